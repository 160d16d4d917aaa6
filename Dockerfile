# mkdir -p outputs && docker build -t mantissa . && docker run --rm --gpus all --ipc=host --user "$(id -u):$(id -g)" -v "$PWD/outputs:/app/outputs" mantissa
# --ipc=host: loading processes pass batches through /dev/shm, of which a container has 64 MiB.
# Any command of the pages may follow `mantissa`: python scripts/compare.py recipe=gpt2 arms=fp32,bf16
#
# --build-arg TORCH_INDEX=  the package index of PyTorch's CPU builds, as its installation page has it: an image without
#                           CUDA, some 5 GB smaller
# --build-arg BASE=         the base image by its digest, for a build that can be repeated: python:3.12-slim@sha256:...
ARG BASE=python:3.12-slim
FROM ${BASE}

# g++: torch.compile on a CPU. The base decides on the versions.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 1000 mantissa && install -d -o mantissa /app && install -d -m 1777 /home/any /app/outputs

# By its number, which Kubernetes' runAsNonRoot can check.
USER 1000
WORKDIR /app

# The dependencies are a layer of their own: code changes do not install torch again.
COPY --chown=mantissa Makefile pyproject.toml constraints.txt README.md LICENSE ./
COPY --chown=mantissa mantissa/__init__.py mantissa/
ARG TORCH_INDEX=""
RUN PIP_NO_CACHE_DIR=1 PIP_EXTRA_INDEX_URL="${TORCH_INDEX}" make setup

COPY --chown=mantissa . .

# Any user may run it (--user): torch's compiler asks for a user's name, libraries for a home to write to. The runs,
# MLflow's store and the caches, of the Hub's downloads too, outlive the container in the mounted folder.
ENV PATH=/app/.venv/bin:$PATH HOME=/home/any USER=mantissa \
    XDG_CACHE_HOME=/app/outputs/.cache MANTISSA_CACHE=/app/outputs/.cache/mantissa \
    MLFLOW_TRACKING_URI=sqlite:////app/outputs/mlflow.db
VOLUME /app/outputs
LABEL org.opencontainers.image.title=Mantissa org.opencontainers.image.licenses=Apache-2.0
# As make train: beside an NVIDIA driver what the GPU has, bf16 or fp16.
CMD ["sh", "-c", "exec python scripts/train.py recipe=gpt2 recipe.size=nano data.tokenizer=bytes precision=$(command -v nvidia-smi >/dev/null && echo auto || echo bf16)"]
