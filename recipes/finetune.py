"""Fine-tune a language model privately: the program of `dpllm train`, for `accelerate launch`; --help shows how."""

from dpllm.config.extras import hush

hush()

from dpllm.training.finetune import program  # noqa: E402 - it imports the libraries

if __name__ == "__main__":
    program()
