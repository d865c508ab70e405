# tqppo in a container. docs/gpus-and-clusters.md has the commands that build and run it.
# CPU: docker build -t tqppo .
# GPU: docker build -t tqppo-gpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
FROM python:3.11-slim

# The index of the torch build. A CUDA build needs nothing else but the driver of the host.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

COPY constraints.txt pyproject.toml README.md LICENSE /opt/tqppo/
COPY tqppo /opt/tqppo/tqppo
COPY backends /opt/tqppo/backends
COPY presets /opt/tqppo/presets
COPY completions /opt/tqppo/completions

RUN pip install --index-url "$TORCH_INDEX" "$(grep '^torch==' /opt/tqppo/constraints.txt)" \
    && pip install --constraint /opt/tqppo/constraints.txt '/opt/tqppo[lora,math,json,hub]'

WORKDIR /work
ENTRYPOINT ["tqppo"]
CMD ["--help"]
