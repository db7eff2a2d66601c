# A slim Python image is enough: kernels are compiled at run time by the NVRTC wheel, and the driver
# comes from the host through the NVIDIA container runtime.
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY app app
COPY engine engine
COPY cuda_src cuda_src
COPY loadtest loadtest
RUN python -m venv /opt/tessera && /opt/tessera/bin/pip install --no-cache-dir --no-compile .

FROM python:3.12-slim
COPY --from=build /opt/tessera /opt/tessera
RUN useradd --uid 10001 --create-home tessera && mkdir -p /cache /models && chown tessera /cache /models
USER tessera
ENV PATH=/opt/tessera/bin:$PATH \
    TESSERA_CACHE_DIR=/cache/tessera \
    HF_HOME=/cache/huggingface \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 8000
ENTRYPOINT ["tessera", "serve"]
