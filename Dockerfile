# Penstock in a container. The first stage makes the wheel, of which the others have no compiler.
#
#   docker build --target cpu -t penstock:cpu .
#   docker build --target cuda -t penstock:cuda .        # needs the NVIDIA Container Toolkit to run with --gpus
#   docker run --rm --gpus all -v /ssd:/ssd -w /ssd penstock:cuda train config.yaml
#
# The disk tier belongs on a drive that is mounted, not in the container's own layer, which is slow and goes with it.
FROM python:3.12-slim-bookworm AS wheel
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY . /penstock
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /penstock

FROM python:3.12-slim-bookworm AS cpu
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu "$(echo /wheels/*.whl)[hf,report]" \
    && penstock --version
ENTRYPOINT ["penstock"]

# torch's own packages bring CUDA; the driver comes from the host. Triton compiles its launchers with a C compiler.
FROM python:3.12-slim-bookworm AS cuda
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[hf,report]" \
    && penstock --version
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENTRYPOINT ["penstock"]
