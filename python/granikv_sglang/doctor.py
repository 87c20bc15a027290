"""``python -m granikv_sglang.doctor [--json]``: what is installed, which hooks landed, which values are in force."""

import sys

from granikv_sglang.server.doctor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
