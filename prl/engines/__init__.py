"""Model servers as the rest sees them: clients that sample and score, samplers, chat templates as token ids.

Start with `client.py` (the interface and the policy's pool) and `sampler.py`.
"""
