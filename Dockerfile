# An image for CPUs (continuous integration has no Docker and does not build it): docker build -t gristmill . ; docker run -v "$PWD:/data" gristmill run --corpus corpus --out out
# Put wheels into ./wheels to build without a network. torch's CPU build comes from there, or from --build-arg TORCH_INDEX=URL.
FROM python:3.12-slim
ARG TORCH_INDEX
COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY gristmill /src/gristmill
COPY gristmill_cli /src/gristmill_cli
COPY gristmill_parity /src/gristmill_parity
COPY gristmill_planner /src/gristmill_planner
COPY preprocessing /src/preprocessing
COPY dedup /src/dedup
COPY training /src/training
COPY wheel[s] /wheels
RUN pip install --no-cache-dir --find-links /wheels ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c /src/constraints.txt \
        "/src[train,report,tokenizers,web,language,hub]" \
    && gristmill compile
WORKDIR /data
ENTRYPOINT ["gristmill"]
CMD ["--help"]
