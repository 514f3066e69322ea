"""``python -m trtllm_dflash``."""

from trtllm_dflash.cli.main import main

main()
