"""What looks at runs from outside: pages, tables, predictions, rollouts, chat, evaluation, sweeps.

Nothing in prl but the commands imports these; they may import all. Start with the tool's own module.
"""
