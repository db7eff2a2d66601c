"""guidellm: a short benchmark by each of its requests, with a model folder's tokenizer."""

import json
import subprocess
import sys
from pathlib import Path

from checks import check, report

URL, MODEL = sys.argv[1:]


def benchmark(request_format):
    """Successful and failed requests, and whether tokens were counted."""
    out = Path(f"{request_format.strip('/').replace('/', '-')}.json")
    command = [
        *(str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={URL},model=tiny,request_format={request_format}"),
        *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3"),
        *("--tokenizer", f"kind=huggingface_auto,model={MODEL}"),
        *("--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=8"),
        *("--output", f"kind=json,path={out}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(out.read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    tokens = found["metrics"]["output_token_count"]["successful"]["mean"]
    return [totals["successful"], totals["errored"], tokens > 1]


@check
def chat():
    return benchmark("/v1/chat/completions")


@check
def completions():
    return benchmark("/v1/completions")


report()
