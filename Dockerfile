# prl in a container: scripts/setup does all of it.
#   docker build -t prl .                       for CPUs
#   docker build -t prl --build-arg ENGINE=gpu --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 .
#   docker run --rm -it --shm-size=8g -v "$PWD/outputs:/prl/outputs" prl prl train algo=opd env=math          (--gpus all)
ARG BASE=ubuntu:24.04
FROM $BASE
ARG ENGINE=cpu
# gcc and Python's headers: for pycosat of env=reasoning_gym, and for the kernels that are compiled on a GPU.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends git gcc python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /prl
COPY . .
RUN PRL_ENGINE=$ENGINE PIP_NO_CACHE_DIR=1 scripts/setup
ENV PATH=/prl/.venv/bin:$PATH
CMD ["bash"]
