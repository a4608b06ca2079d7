"""Fine-tune a language model privately: the program of `dpllm train`, for `accelerate launch`; --help shows how."""

from dpllm.training.finetune import program

if __name__ == "__main__":
    program()
