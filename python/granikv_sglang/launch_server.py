"""``python -m granikv_sglang.launch_server``: SGLang's server with GraniKV on; takes every flag SGLang takes."""

import sys

from granikv_sglang.server.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
