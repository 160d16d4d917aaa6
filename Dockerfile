# mkdir -p outputs && docker build -t mantissa . && docker run --rm --gpus all -v "$PWD/outputs:/app/outputs" mantissa
FROM python:3.12-slim

# g++: torch.compile on a CPU.
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 mantissa && mkdir /app && chown mantissa /app
USER mantissa
WORKDIR /app

# The dependencies are a layer of their own: code changes do not install torch again.
COPY --chown=mantissa Makefile pyproject.toml constraints.txt README.md LICENSE ./
RUN make setup

COPY --chown=mantissa . .
# The runs, and MLflow's store beside them, outlive the container in the mounted folder.
ENV MLFLOW_TRACKING_URI=sqlite:////app/outputs/mlflow.db
CMD ["make", "train"]
