"""`python -m minivllm` is the same as the command `minivllm`."""

from minivllm.cli import main

if __name__ == "__main__":
    main()
