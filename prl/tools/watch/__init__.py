"""The live page of runs, over the files that they write anyway: `prl watch`. Nothing here writes, or changes a run.

`server.py` answers the browser, `feed.py` reads what has come since, `listing.py` finds the runs, and `rollouts.py`
searches their rollouts. What a page shows of a run is `prl.tools.report`.
"""
