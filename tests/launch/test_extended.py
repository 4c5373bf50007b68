"""A schedule of the user's own: its options, built in the trainer's process."""

import json
import sys

from prepared_run import planned, validated

from prl.config.build import build
from prl.config.compose import compose
from prl.trainer.schedule import Schedule

MODULE = """
from dataclasses import dataclass
from prl.trainer.schedule import Schedule

@dataclass(kw_only=True)
class Halving(Schedule):
    every: int = 10

    def factor(self, step, max_steps):
        return 0.5 ** (step // self.every)
"""


def test_user_schedule_runs_in_the_trainer(tmp_path, monkeypatch):
    (tmp_path / "their_schedule.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    chosen = ["schedule=custom", "trainer.schedule._target_=their_schedule.Halving", "+trainer.schedule.every=4"]
    config = compose(["run.name=x", *chosen])
    validated(config)
    payload = json.loads(json.dumps(planned(config).trainer.payload))
    made = build(payload["trainer"]["schedule"], Schedule, "trainer.schedule")
    sys.modules.pop("their_schedule")
    assert made.factor(8, 100) == 0.25
