"""Divergences by their definitions, of probabilities."""

import torch


def kl(p, q):
    return (p * (p.log() - q.log())).sum(-1)


def plain(p, q, kind, beta):
    """The definitions, of probabilities."""
    m = beta * q + (1 - beta) * p
    return {
        "reverse_kl": lambda: kl(p, q),
        "forward_kl": lambda: kl(q, p),
        "jsd": lambda: beta * kl(q, m) + (1 - beta) * kl(p, m),
    }[kind]()


def merged(p, ids):
    """Probabilities of some tokens, and of all others as one."""
    taken = p.gather(1, ids)
    rest = p.scatter(1, ids, 0.0).sum(1, keepdim=True)
    return torch.cat([taken, rest], 1)
