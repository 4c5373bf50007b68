"""The search in a run's rollouts, against a plain reading of the whole files."""

import itertools
import json

import pytest

from prl.base.errors import ConfigError
from prl.tools.watch import rollouts
from prl.tools.watch.rollouts import asked, search


@pytest.fixture
def run(folder):
    """Forty-eight rollouts with rewards, turns, tool calls and filters of all kinds."""
    for step, path in enumerate(sorted((folder / "a" / "rollouts").glob("step_*.jsonl")), start=1):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for place, line in enumerate(lines):
            line["reward"] = None if place == 5 else (place % 5) / 4
            line["matched"] = {"pre_batch": "repetition"} if place % 3 == 0 else {}
            again = [{"role": "tool", "content": "7"}, {"role": "assistant", "content": "Is SEVEN"}]
            line["messages"] += again * (place % 4)
            if place == 2:
                line["outcome"] = {"stage": "failed", "reason": f"no Room at {step}", "source": "env"}
            if place == 7:
                line["messages"][1]["tool_calls"] = [{"name": "Calculate", "arguments": '{"x": 1}'}]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "a"


def ids(rows):
    return [(row["step"], row["group"], row.get("rollout", 0)) for row in rows]


def fits(row, name, value):
    """Whether a line of a file has what one part of a search names."""
    reward = row["reward"]
    return {
        "step": str(row["step"]) == value,
        "env": row["env"] == value,
        "outcome": value.split(" ")[0] == row["outcome"]["stage"].replace("_", "-"),
        "filter": value in row["matched"].values(),
        "turns": value.isdecimal() and [each["role"] for each in row["messages"]].count("assistant") >= int(value),
        "least": reward is not None and name == "least" and reward >= float(value),
        "most": reward is not None and name == "most" and reward <= float(value),
        "text": value.lower() in json.dumps([row["messages"], row["task"], row["outcome"]]).lower(),
    }[name]


def expected(run, query):
    """The rollouts of the newest step first, each tried by the query's own words."""
    paths = sorted((run / "rollouts").glob("step_*.jsonl"), reverse=True)
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return ids([row for row in rows if all(fits(row, name, value) for name, value in query.items())])


ASKED = {
    "step": "2",
    "env": "math",
    "outcome": "post-filtered (zero_advantage)",
    "filter": "repetition",
    "turns": "3",
    "least": "0.5",
    "most": "0.75",
    "text": "is seven",
}
QUERIES = [dict(pairs) for count in (0, 1, 2) for pairs in itertools.combinations(ASKED.items(), count)]
QUERIES += [{"text": "ROOM at 3"}, {"text": "calculate"}, {"outcome": "failed (env)"}, {"env": "none"}, {"step": "9"}]


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: ",".join(query) or "all")
def test_a_search_finds_what_a_plain_reading_finds(run, query):
    found = search(run, asked(query))
    assert ids(found["rows"]) == expected(run, query)
    assert found["before"] is None and found["steps"] == [1, 2, 3] and found["exported"] == [3]


def test_a_search_goes_on_where_it_ended(run, monkeypatch):
    monkeypatch.setattr(rollouts, "PAGE", 10)
    parts, before = [], {}
    for last in (3, 2, None):
        found = search(run, before)
        parts += found["rows"]
        before = {"before": found["before"]}
        assert found["before"] == last
    assert ids(parts) == expected(run, {})


def test_a_search_without_results_ends_in_time(run, monkeypatch):
    monkeypatch.setattr(rollouts, "SECONDS", 0.0)
    found = search(run, {"text": "in none of them"})
    assert (found["rows"], found["before"]) == ([], 3), "it says how far it looked"


@pytest.mark.parametrize("query", [{"step": "x"}, {"least": "much"}, {"turns": "--"}, {"step": "1e999"}])
def test_what_is_no_number_is_refused(query):
    with pytest.raises(ConfigError, match="is no number"):
        asked(query)
