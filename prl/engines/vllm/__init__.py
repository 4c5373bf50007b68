"""vLLM as an engine: its server, the routes that prl adds, how it takes new weights.

Start with `server.py` and `routes.py`. The only code that imports vLLM, and the home of every private touch of it.
"""
