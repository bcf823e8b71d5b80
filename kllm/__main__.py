"""`python -m kllm` is `kllm`."""

from kllm.cli.app import main

if __name__ == "__main__":  # processes that are spawned import this file under another name
    main()
