"""A server that speaks the Tinker protocol: the loop belongs to the client, prl lends trainer and engine.

`prl serve api=tinker model=<any>` starts it. Nothing else of prl imports this package. From below: `wire.py` has the
bytes of requests and results, `losses.py` the losses by Tinker's names, `graph.py` those that clients trace,
`learner.py` the models that are trained, `ranks.py` the processes that do it together, `sampler.py` samples
(`in_process.py`, `on_servers.py`: by which engine), `store.py` the server's directory, `service.py` the queues,
`server.py` the routes.
"""
