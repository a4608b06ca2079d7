# CPU:  docker build -t dpllm .
# GPU:  docker build -t dpllm:cuda --build-arg TORCH_BACKEND=cu130 .   (`uv pip install --help` lists them)
# Run:  docker run --rm --user "$(id -u)" -v "$PWD:/data" dpllm train recipe.yaml          (GPUs: --gpus all --ipc=host)
FROM python:3.13-slim AS build
ARG TORCH_BACKEND=cpu
ENV VIRTUAL_ENV=/opt/dpllm UV_NO_CACHE=1
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends git && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir uv==0.13.9 && uv venv "$VIRTUAL_ENV"
WORKDIR /source
COPY constraints.txt requirements.lock ./
RUN uv pip install --torch-backend "$TORCH_BACKEND" --constraint constraints.txt torch \
    && uv pip install --no-deps --require-hashes --requirement requirements.lock
# With .git: the version and the commit that reports name are those of the checkout.
COPY . .
RUN uv pip install --no-deps --no-build-isolation .

FROM python:3.13-slim
# Triton and torch.compile compile kernels with a C compiler, as a run starts.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 dpllm && chmod 777 /home/dpllm
COPY --from=build /opt/dpllm /opt/dpllm
ENV PATH=/opt/dpllm/bin:$PATH HOME=/home/dpllm
USER 1000
WORKDIR /data
ENTRYPOINT ["dpllm"]
CMD ["--help"]
