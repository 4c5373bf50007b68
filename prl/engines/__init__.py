"""What runs models: `base.py` is the seam, and a class beside it is a way to do it.

Start reading at `base.py`, then `transformers.py`, which is the seam's shortest implementation. May import `config`,
`errors` and `inference`.
"""
