"""Work out the tables of the pages again from the files beside them.

    python experiments/recompute.py [page ...]

Prints a line a row, and exits with 1 where a page has another number. The files have a value a run or a task.
Intervals are 95 %, Student's t over seeds.
"""

import re
import sys
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.distil_back import check as thresholds
from experiments.max_rl import check as pass_at_k
from experiments.smollm2 import held_out
from prl.tools.report.statistics import half_interval, plus_minus

HERE = Path(__file__).parent
TIMES = "\u00d7"
Row = list[str]
"""The first cells of a row as the page has them."""


def by_seed(page: str, metric: str, statistic: str = "final") -> pd.DataFrame:
    """Return a statistic of the runs of a page: a row a variant, a column a seed."""
    runs = pd.read_csv(HERE / page / "summary.csv")
    return runs[runs["metric"] == metric].pivot(index="variant", columns="seed", values=statistic)


def tables(text: str) -> list[list[Row]]:
    """Return the tables of a Markdown text, each as the cells of its rows."""
    blocks = groupby(text.splitlines(), key=lambda line: line.startswith("|"))
    rows = [[line.strip().strip("|").split("|") for line in block] for is_table, block in blocks if is_table]
    return [[[plain(cell) for cell in row] for row in table] for table in rows]


def plain(cell: str) -> str:
    """Return a cell of a table without what is there for the eye."""
    return cell.replace("**", "").replace(" fewer", "").strip()


def short(text: str) -> str:
    """Return numbers as the pages write them: `.5` and `−.5`."""
    return re.sub(r"(?<![\d.])0\.", ".", text).replace("-", "−").replace(" x ", f" {TIMES} ")


def interval(values: pd.Series, sign: str = "") -> str:
    """Return mean ± half the interval."""
    return short(plus_minus(values, sign))


def span(values: pd.Series) -> str:
    """Return the mean, and the lowest and the highest value."""
    return short(f"{values.mean():.3f} ({values.min():.3f} to {values.max():.3f})")


def whole(values: pd.Series) -> str:
    """Return mean ± half the interval in whole numbers."""
    return f"{values.mean():,.0f} ± {half_interval(values):,.0f}"


def ratio(before: pd.Series, after: pd.Series) -> str:
    """Return the geometric mean of a ratio by seed, and its interval; or of how few seeds there is one."""
    logs = np.log(before / after)
    found = int(logs.notna().sum())
    if found < len(logs):
        return f"{found} of {len(logs)} seeds" if found else "no seed"
    return short(thresholds.geometric_mean(logs).replace(" (", " x ("))


def sanity() -> Iterable[Row]:
    reward, gap, kl = (by_seed("sanity", f"{name}/mean") for name in ("reward/all", "logprob_gap", "mismatch_kl/all"))
    for engine in ("float32", "bfloat16"):
        for correction in ("none", "tis"):
            variant = f"dtype={engine}, correction={correction}"
            small = [f"{values.loc[variant].mean():.0e}".replace("e-0", "e-") for values in (gap, kl)]
            yield [engine, correction, span(reward.loc[variant]), *(text.replace("0e+00", "0") for text in small)]


def max_rl() -> Iterable[Row]:
    found = pd.read_csv(HERE / "max_rl" / "pass_at_k.csv", index_col=["variant", "seed"])
    for label, *cells in pass_at_k.table(found[["1", "4", "16", "64", "256"]]):
        name = re.sub(r" − grpo, \d+", " − grpo", label)
        yield [name.replace(", ", ", groups of "), *map(short, cells)]
    runs = pd.read_csv(HERE / "max_rl" / "deviation.csv")
    tries = {variant: of_variant.set_index("seed")[runs.columns[2:]] for variant, of_variant in runs.groupby("variant")}
    yield ["base, again", *(short(f"{value:.3f}") for value in tries["base"].iloc[0])]
    for variant in ("grpo", "grpo, divided", "max_rl"):
        yield [f"{variant}, three seeds", *(span(tries[variant][k]) for k in tries[variant])]
    lead = tries["max_rl"] - tries["grpo, divided"]
    yield ["max_rl − grpo, divided", *(interval(lead[k], "+") for k in lead)]


def forgetting() -> Iterable[Row]:
    runs = pd.read_csv(HERE / "forgetting" / "kl.csv")
    envs = ("math", "guess", "alphabet_sort")
    ends = {env: by_seed("forgetting", f"eval/{env}/avg@1") for env in envs}
    for arm, of_arm in runs.groupby("arm"):
        if arm == "start":
            yield ["start", *(interval(of_arm[env]) for env in envs), "0"]
            continue
        moved = short(f"{of_arm['kl'].mean():.1f} ± {half_interval(of_arm['kl']):.1f}")
        yield [str(arm), *(interval(ends[env].loc[f"arm=forgetting_{arm}"]) for env in envs), moved]

    yield from matched()


def matched() -> Iterable[Row]:
    """Return what alphabet_sort has lost at equal rewards of math, by arm and rate, and against grpo's."""
    curves = pd.read_csv(HERE / "forgetting" / "rates.csv").groupby(["arm", "lr", "seed"])
    lost = curves.apply(lambda run: pd.Series({level: lost_at(run, level) for level in (0.6, 0.7, 0.8)}))
    for arm, of_arm in lost.groupby(level="arm"):
        for rate, label in ((1e-4, "1e-4"), (2e-4, "2e-4"), (5e-4, "5e-4")):
            own = of_arm.loc[arm, rate]
            yield [f"{arm}, {label}", *(reached(own[level]) for level in own)]
            if arm != "grpo":
                more = own - lost.loc["grpo", rate]
                yield [f"{arm} − grpo, {label}", *(reached(more[level], "+") for level in more)]


def lost_at(run: pd.DataFrame, level: float) -> float:
    """Return what a run had lost of alphabet_sort when its reward of math first was at a level; NaN: it never was.

    Between two evaluations both go in a straight line.
    """
    above = run["math"].to_numpy() >= level
    last = max(1, int(above.argmax()))
    ends = run.iloc[last - 1 : last + 1]
    then = np.interp(level, ends["math"], ends["alphabet_sort"]) if above.any() else np.nan
    return float(run["alphabet_sort"].iloc[0] - then)


def reached(values: pd.Series, sign: str = "") -> str:
    """Return mean ± half the interval, or of how many seeds there is a value."""
    found = int(values.notna().sum())
    return interval(values, sign) if found == len(values) else f"{found} of {len(values)} seeds"


def distil_back() -> Iterable[Row]:
    found = pd.read_csv(HERE / "distil_back" / "reached.csv", index_col=["arm", "rate", "threshold", "seed"])["steps"]
    rewards = (0.75, 0.8, 0.85)
    before = {reward: found.loc["grpo", 2e-4, reward] for reward in rewards}
    names = {"grpo": "grpo", "sampled": "opd, sampled token", "top_k": "opd, top 32", "full": "opd, all 304"}
    yield ["grpo, steps", "2e-4", *(f"{before[reward].mean():.1f}" for reward in rewards)]
    for arm, name in names.items():
        for rate, label in ((1e-4, "1e-4"), (2e-4, "2e-4"), (5e-4, "5e-4")):
            if (arm, rate) in found.index.droplevel(["threshold", "seed"]) and (arm, rate) != ("grpo", 2e-4):
                yield [name, label, *(ratio(before[reward], found.loc[arm, rate, reward]) for reward in rewards)]


def staleness() -> Iterable[Row]:
    rewards = by_seed("staleness", "eval/math/avg@1")
    losses = {name: (name, "false") for name in ("default", "cispo", "ppo", "aipo", "ipo")}
    for name, (loss, proximal) in (losses | {"ppo, decoupled": ("ppo", "true")}).items():
        at = [rewards.loc[f"loss={loss}, max_async_level={level}, proximal={proximal}"] for level in (0, 2, 4, 8, 16)]
        yield [name, *map(interval, at), interval(at[0] - at[-1])]


def lora() -> Iterable[Row]:
    rewards = by_seed("lora", "eval/math/avg@1")
    for rate, label in (("0.0001", "1e-4"), ("0.0003", "3e-4"), ("0.001", "1e-3"), ("0.003", "3e-3")):
        yield [label, *(span(rewards.loc[f"rank={rank}, lr={rate}"]) for rank in ("1", "4", "16", "null"))]


def credit() -> Iterable[Row]:
    found = pd.read_csv(HERE / "credit" / "equal_tokens.csv", index_col=["env", "arm", "tokens"])
    envs = ("guess", "alphabet_sort")
    equal = [found.loc[env].droplevel("tokens") for env in envs]
    ends = [by_seed("credit", f"eval/{env}/avg@1").filter(like=f"env={env}, ", axis="index") for env in envs]
    ends = [rewards.rename(lambda variant: variant.split("arm=")[1]) for rewards in ends]
    for when, of_envs in (("", equal), (", at the end", ends)):
        for arm in ("grpo", "turn", "replay", "echo"):
            cells = [f"{arm}{when}"]
            for rewards in of_envs:
                lead = rewards.loc[f"credit_{arm}"] - rewards.loc["credit_grpo"]
                cells += [interval(rewards.loc[f"credit_{arm}"]), "" if arm == "grpo" else interval(lead, "+")]
            yield cells
    sampled = [f"`{env}`, {found.loc[env].index.unique('tokens')[0]:,.0f} tokens" for env in envs]
    yield ["", sampled[0], "against grpo", sampled[1], "against grpo"]
    yield from calculator()


def calculator() -> Iterable[Row]:
    """Return rewards and the cross-entropy of the tool's answers of grpo and echo, and echo's lead."""
    runs = pd.read_csv(HERE / "credit" / "calculator.csv")
    evaluated = runs[runs["step"] > 0]
    means = evaluated.groupby(["arm", "seed"])["reward"].mean()
    ends = evaluated.groupby(["arm", "seed"]).last()
    for arm in runs["arm"].unique():
        nll = [evaluated[evaluated["arm"] == arm].groupby("seed")["nll"].agg(place) for place in ("first", "last")]
        leads = ["" if arm == "grpo" else span(own.loc[arm] - own.loc["grpo"]) for own in (means, ends["reward"])]
        known = ["" if values.isna().any() else span(values) for values in nll]
        yield [str(arm), span(means.loc[arm]), leads[0], span(ends["reward"].loc[arm]), leads[1], *known]


def smollm2() -> Iterable[Row]:
    for name, of_run in held_out.curves().groupby("run", sort=False):
        ends = of_run.iloc[[0, -1]]
        rewards = [
            f"{end.mean:.3f} ± {end.half:.3f}" + (f" ({end.low:.3f} to {end.high:.3f})" if end.seeds > 1 else "")
            for end in ends.itertuples()
        ]
        yield [str(name), *map(short, rewards), f"{ends['replies'].diff().iloc[-1]:,.0f}"]
    mean, half = held_out.lead("sums, grpo", "sums, grpo by TRL", 30)
    yield ["sums, grpo − grpo by TRL", "", short(f"{mean:+.3f} ± {half:.3f}"), ""]


def opd_grpo_sft() -> Iterable[Row]:
    held_out, sampled = (by_seed("opd_grpo_sft", name) for name in ("eval/math/avg@1", "reward/all/mean"))
    tokens = by_seed("opd_grpo_sft", "eval/math/avg@1", "tokens")
    for arm in ("grpo", "opd", "sft"):
        variant = f"algo={arm}"
        spent = "not reached" if tokens.loc[variant].isna().any() else whole(tokens.loc[variant])
        yield [arm, interval(held_out.loc[variant]), interval(sampled.loc[variant]), spent]


def opsd_drift() -> Iterable[Row]:
    first, best, last = (by_seed("opsd_drift", "eval/math/avg@1", name) for name in ("first", "best", "final"))
    cut = by_seed("opsd_drift", "truncated/all") * 100
    for limit in ("", "3"):
        for rate, label in (("0.0002", "2e-4"), ("0.0005", "5e-4")):
            variant = f"lr={rate}, max_tokens={limit or 'null'}"
            half = half_interval(cut.loc[variant])
            share = f"{cut.loc[variant].mean():.0f} %" + (f" ± {half:.0f}" if half >= 0.5 else "")
            base = short(f"{first.loc[variant].mean():.2f}")
            yield [label, limit, base, interval(best.loc[variant]), interval(last.loc[variant]), share]


def mixed() -> Iterable[Row]:
    for env, label in (("math", "math (grpo)"), ("reverse_text", "reverse_text (opd)")):
        first, last = (by_seed("mixed", f"eval/{env}/avg@1", name).iloc[0] for name in ("first", "final"))
        yield [label, short(f"{first.mean():.2f}"), interval(last)]


def difficulty() -> Iterable[Row]:
    rewards = by_seed("difficulty", "eval/math/avg@1")
    means = [by_seed("difficulty", name, "area") for name in ("rollouts/arrived", "rollouts/trained", "tokens/rl")]
    pools = [by_seed("difficulty", f"pool/math/{name}") for name in ("easy", "hard")]
    for name in ("default", "pools", "odf", "pools_odf"):
        variant = f"curriculum={name}"
        shares = ", ".join(f"{pool.loc[variant].mean():.0%}".replace("%", " %") for pool in pools)
        pooled = shares if name.startswith("pools") else ""
        yield [name, interval(rewards.loc[variant]), *(whole(mean.loc[variant]) for mean in means), pooled]


def recipes() -> Iterable[Row]:
    rewards = by_seed("recipes", "eval/math/avg@1")
    updates = {"dapo": 1, "gkd": 1, "default": 1, "rloo": 1, "tis": 2, "gspo": 4, "cispo": 4}
    sweeps = {1: "recipes", 2: "recipes-half", 4: "recipes-lower"}
    for recipe, count in updates.items():
        sweep = "recipes-grpo" if recipe == "default" else "recipes"
        cells = ["grpo" if recipe == "default" else recipe, f"{count}"]
        cells += [span(rewards.loc[f"{sweep} (experiment={recipe}, lr=0.0005)"])]
        lower = f"{sweeps[count]} (experiment={recipe}, lr={0.0005 / count:g})"
        yield [*cells, span(rewards.loc[lower]) if count > 1 else ""]


PAGES: dict[str, Callable[[], Iterable[Row]]] = {
    each.__name__: each
    for each in (
        sanity, max_rl, forgetting, distil_back, staleness, lora, credit, smollm2,
        opd_grpo_sft, opsd_drift, mixed, difficulty, recipes,
    )
}  # fmt: skip


def agrees(row: Row, cells: list[str]) -> bool:
    """Return whether a row of a page has what was worked out: the same cells. Its label may go on after a comma."""
    label, *numbers = row
    return cells[1:] == numbers and f"{cells[0]},".startswith(f"{label},")


def differences(name: str) -> list[Row]:
    """Print the rows of a page's tables. Return those that the page lacks, and its rows that no file has."""
    rows = list(PAGES[name]())
    found = tables((HERE / name / "README.md").read_text())
    lost = [row for row in rows if not any(agrees(row, cells) for table in found for cells in table)]
    for row in rows:
        print(f"{name}: {' | '.join(row)}{'   NOT ON THE PAGE' if row in lost else ''}")
    recomputed = [table for table in found if any(agrees(row, cells) for row in rows for cells in table)]
    # Behind the head and the line below it.
    extra = [cells for table in recomputed for cells in table[2:] if not any(agrees(row, cells) for row in rows)]
    for cells in extra:
        print(f"{name}: {' | '.join(cells)}   ON THE PAGE ALONE")
    return lost + extra


if __name__ == "__main__":
    found = [row for name in sys.argv[1:] or PAGES for row in differences(name)]
    raise SystemExit(bool(found))
