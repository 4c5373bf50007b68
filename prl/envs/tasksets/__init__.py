"""Tasksets that come with prl: verifiers v1 plugins, one module each, each of which can be copied to begin a new one.

Start with `reverse_text.py` (one reply) or `guess.py` (several). They share `base.py` and the graders.
"""
