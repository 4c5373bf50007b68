# What every run script begins with: the repository's root, its Python, and the two commands.
# A call again does what is missing; SECONDS is bash's own clock of the script.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}

# A sweep: small batches, three seeds, one engine for its jobs, the learning rate that the results here were measured with.
train() {
    "$python" -m prl.train -m seed=0,1,2 sweep.share_engine=true model.lr=5e-4 trainer.schedule.decay_fraction=0.5 \
        orchestrator.batch_size=128 orchestrator.group_size=8 orchestrator.eval.every=10 "$@"
}

# The table and the curves of one or more sweeps: report <name> <folder>... [options of prl report]
report() {
    "$python" -m prl report "${@:2}" --out "experiments/$1"
    echo "experiments/$1: $SECONDS s" >&2
}
