"""Completion of `prl` in a shell: a script for each shell, and the words that it asks for.

Start with `__main__.py`.
"""
