# prl in a container: scripts/setup does all of it. No GPU is needed to build.
#   docker build -t prl .                       for CPUs
#   docker build -t prl --build-arg ENGINE=gpu --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 .
# To train, as yourself, with runs in outputs/ here (on GPUs with --gpus all as well):
#   mkdir -p outputs
#   docker run --rm -it --init --shm-size=8g --user "$(id -u):$(id -g)" -v "$PWD/outputs:/prl/outputs" prl train algo=opd
ARG BASE=ubuntu:24.04
FROM $BASE
ARG ENGINE=cpu
# A compiler and Python's headers: for pycosat of env=reasoning_gym, and for the kernels that are compiled on a GPU or with
# trainer.compile. libnuma: for vLLM's build for CPUs. git: says in provenance.json which commit a run came from.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        git g++ libnuma1 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && git config --system --add safe.directory /prl \
    && mkdir -m 1777 /home/prl
WORKDIR /prl
# What set-up reads comes first: another change of the code installs nothing again.
COPY pyproject.toml ./
COPY scripts/setup scripts/setup
COPY scripts/locks scripts/locks
COPY prl/__init__.py prl/__init__.py
ENV PRL_ENGINE=$ENGINE PATH=/prl/.venv/bin:$PATH
# All bytecode, since who runs the image may write none. A file may be written for a later Python.
RUN mkdir conf && touch README.md && scripts/setup && rm -r ~/.cache && (python -m compileall -q -j 0 .venv/lib || true)
COPY . .
RUN scripts/setup && python -m compileall -q prl && mkdir -p -m 1777 outputs
# A home that any user may write to, and a name for one that the image does not know.
ENV HOME=/home/prl USER=prl
ENTRYPOINT ["prl"]
CMD ["--help"]
