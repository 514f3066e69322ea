#!/bin/sh
# Deploys the engine directory in $ENGINES (default /engines) and serves it; arguments go to `trtllm-dflash serve`.
# Triton itself listens on loopback only (and serves metrics): clients use the OpenAI front end on port 9000.
set -eu
trtllm-dflash deploy --engines "${ENGINES:-/engines}" --output /models/repository \
    --model-name "${MODEL_NAME:-dflash}" --max-queue "${MAX_QUEUE:-256}" --force
# exec: SIGTERM must reach `serve`, which drains.
exec trtllm-dflash serve --model-repository /models/repository --openai-port 9000 --openai-host 0.0.0.0 "$@"
