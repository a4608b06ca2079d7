"""Launch scripts: they parse, explain themselves, and print (DRY_RUN=1) the very command that they would run."""

import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from tests import children

ROOT = Path(__file__).parents[1]
SCRIPTS = ["local.sh", "torchrun.sh", "slurm.sbatch"]
RECIPE = "recipes/quickstart.yaml"
FSDP2 = "accelerate_configs/fsdp2.yaml"
CLEAN = (
    *("NUM_PROCESSES", "NNODES", "NPROC_PER_NODE", "NODE_RANK", "RDZV_ENDPOINT", "RDZV_PORT", "RDZV_ID"),
    *("ACCELERATE", "DRY_RUN"),
)


def call(script, *arguments, **variables):
    environment = {k: v for k, v in os.environ.items() if k not in CLEAN and not k.startswith("SLURM_")}
    return children.run(
        ["bash", f"launch/{script}", *arguments],
        cwd=ROOT,
        env={**environment, **variables},
        check=False,
    )


def command(script, *arguments, **variables):
    done = call(script, *arguments, DRY_RUN="1", **variables)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


@pytest.fixture
def slurm(tmp_path):
    """Variables of a Slurm job on two nodes, with a `scontrol` that names them."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\nprintf 'node7\\nnode8\\n'\n")
    scontrol.chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck isn't installed")
def test_shellcheck():
    """Shellcheck has nothing to say."""
    done = children.run(["shellcheck", "-x", *(f"launch/{script}" for script in SCRIPTS)], cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_usage(script, arguments):
    """Without arguments a script prints how it is called, and nothing of its code, and fails."""
    done = call(script, *arguments)
    assert done.returncode == 2
    assert f"launch/{script} RECIPE ACCELERATE_CONFIG [KEY=VALUE]..." in done.stderr
    assert "DRY_RUN=1" in done.stderr and "SBATCH" not in done.stderr and "pipefail" not in done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_missing_file(script):
    """A recipe or a config that isn't there is named."""
    assert "recipes/none.yaml is not a file" in call(script, "recipes/none.yaml", FSDP2).stderr
    done = call(script, RECIPE, "accelerate_configs/none.yaml")
    assert done.returncode == 2 and "accelerate_configs/none.yaml is not a file" in done.stderr
    assert "a recipe and an accelerate config are needed" in call(script, RECIPE).stderr


def test_local():
    """One node: recipe, config and overrides reach the one program; the number of processes can be replaced."""
    expected = ["accelerate", "launch", "--config_file", FSDP2]
    program = ["recipes/finetune.py", "--config", RECIPE, "train.output_dir=my run"]
    assert command("local.sh", RECIPE, FSDP2, "train.output_dir=my run") == expected + program
    replaced = command("local.sh", RECIPE, FSDP2, "train.output_dir=my run", NUM_PROCESSES="4")
    assert replaced == [*expected, "--num_processes", "4", *program]
    assert "NUM_PROCESSES must be a number" in call("local.sh", RECIPE, FSDP2, NUM_PROCESSES="four").stderr


def test_names_of_recipes_and_configs_are_those_of_dpllm_train():
    """A path, a file's name or its stem; anything else is refused with the folder in which it was looked for."""
    by_path = command("local.sh", RECIPE, FSDP2)
    assert by_path == command("local.sh", Path(RECIPE).stem, Path(FSDP2).stem)
    assert by_path == command("local.sh", Path(RECIPE).name, Path(FSDP2).name)
    refused = call("local.sh", Path(RECIPE).stem, "fsdp3")
    assert refused.returncode == 2 and "fsdp3 is not a file, nor the name of one in" in refused.stderr


def test_local_runs_what_it_prints(tmp_path):
    """Without DRY_RUN the printed command is run, from the repository's root, and its exit code handed on."""
    stub = tmp_path / "accelerate"
    stub.write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$@"\nexit 7\n')
    stub.chmod(0o755)
    done = call("local.sh", RECIPE, FSDP2, "train.seed=1", ACCELERATE=str(stub))
    assert done.returncode == 7
    printed = command("local.sh", RECIPE, FSDP2, "train.seed=1", ACCELERATE=str(stub))
    assert done.stdout.splitlines() == [str(ROOT), *printed[1:]]


def test_cpu_configs():
    """A config for the CPU hides GPUs, and tells accelerate where it has no other way to know."""
    hidden = ["env", "CUDA_VISIBLE_DEVICES="]
    ddp = command("local.sh", RECIPE, "accelerate_configs/cpu_ddp.yaml")
    assert ddp[:4] == [*hidden, "ACCELERATE_USE_CPU=true", "accelerate"]
    zero = command("local.sh", RECIPE, "accelerate_configs/cpu_zero2.yaml")
    assert zero[:3] == [*hidden, "accelerate"]  # with ACCELERATE_USE_CPU accelerate would leave DeepSpeed out


@pytest.mark.parametrize("manifest", ["kubernetes.yaml", "kubernetes_trainjob.yaml"])
def test_interfaces_are_named(manifest):
    """The processes compare over gloo, so its interface is named beside that of NCCL."""
    text = (ROOT / "launch" / manifest).read_text()
    assert all(f"name: {name}_SOCKET_IFNAME" in text for name in ("NCCL", "GLOO"))


def flags(words):
    """What `accelerate launch` is given before the program's name."""
    return dict(zip(words[2::2], words[3::2], strict=False))


def test_torchrun():
    """Several nodes: the rendezvous and the total number of processes reach accelerate, which honours the config."""
    words = command("torchrun.sh", RECIPE, FSDP2, "a=1", NNODES="4", RDZV_ENDPOINT="node0:29501", NPROC_PER_NODE="2")
    given = flags(words[: words.index("recipes/finetune.py")])
    assert given == {
        "--config_file": FSDP2,
        "--num_machines": "4",
        "--num_processes": "8",
        "--machine_rank": "0",
        "--rdzv_backend": "c10d",
        "--rdzv_conf": "read_timeout=600,join_timeout=600",
        "--main_process_ip": "node0",
        "--main_process_port": "29501",
    }
    assert words[words.index("recipes/finetune.py") :] == ["recipes/finetune.py", "--config", RECIPE, "a=1"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RDZV_ENDPOINT": "h:1"}, "NNODES must be a number of at least 1"),
        ({"NNODES": "0", "RDZV_ENDPOINT": "h:1"}, "NNODES must be a number of at least 1"),
        ({"NNODES": "2"}, "RDZV_ENDPOINT must be HOST:PORT"),
        ({"NNODES": "2", "RDZV_ENDPOINT": "host"}, "RDZV_ENDPOINT must be HOST:PORT"),
        ({"NNODES": "2", "RDZV_ENDPOINT": "h:1", "NODE_RANK": "first"}, "NODE_RANK must be a number"),
        ({"NNODES": "2", "RDZV_ENDPOINT": "h:1", "NPROC_PER_NODE": "all"}, "NPROC_PER_NODE must be a number"),
    ],
)
def test_torchrun_needs_its_variables(variables, message):
    """A variable that is missing or makes no sense is named."""
    done = call("torchrun.sh", RECIPE, FSDP2, **variables)
    assert done.returncode == 2 and message in done.stderr


def test_accelerate_knows_the_flags():
    """Every flag of the scripts is one of `accelerate launch`, which would hand an unknown one to the program."""
    from accelerate.commands.launch import launch_command_parser

    words = command("torchrun.sh", RECIPE, "accelerate_configs/zero2.yaml", NNODES="2", RDZV_ENDPOINT="node0:29501")
    arguments = launch_command_parser().parse_args(words[2:])
    assert [arguments.training_script, *arguments.training_script_args] == ["recipes/finetune.py", "--config", RECIPE]
    assert (arguments.num_machines, arguments.num_processes, arguments.rdzv_backend) == (2, 16, "c10d")


def test_slurm(slurm):
    """Slurm starts one agent per node, and all of them meet at the first."""
    words = command("slurm.sbatch", RECIPE, FSDP2, "a=1", **slurm)
    agent = words.index("launch/torchrun.sh")
    assert words[agent:] == ["launch/torchrun.sh", RECIPE, FSDP2, "train.resume_from_checkpoint=auto", "a=1"]
    assert words[:agent] == ["srun", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    words = command("slurm.sbatch", RECIPE, FSDP2, **slurm, SLURM_CPUS_PER_TASK="12")
    assert "--cpus-per-task=12" in words[: words.index("launch/torchrun.sh")]
    text = (ROOT / "launch/slurm.sbatch").read_text()
    assert all(f"#SBATCH {option}" in text for option in ("--requeue", "--open-mode=append", "--signal=B:USR1@300"))
    # Started by hand it says what to do.
    assert "submit it with sbatch" in call("slurm.sbatch", RECIPE, FSDP2).stderr
    done = call("slurm.sbatch", RECIPE, FSDP2, SLURM_SUBMIT_DIR="/")
    assert done.returncode == 2 and "is not the repository's root" in done.stderr


def test_slurm_sets_what_torchrun_reads(slurm, tmp_path):
    """The variables exported for the agents are those of the job."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$NNODES $NPROC_PER_NODE $RDZV_ENDPOINT $RDZV_ID"\nexit 3\n')
    srun.chmod(0o755)
    done = call("slurm.sbatch", RECIPE, FSDP2, **slurm, SLURM_GPUS_ON_NODE="4", SLURM_JOB_ID="170042")
    assert done.stdout.split() == ["2", "4", "node7:20042", "dpllm-170042-0"] and done.returncode == 3
    done = call("slurm.sbatch", RECIPE, FSDP2, **slurm, SLURM_JOB_ID="7", RDZV_PORT="29500")
    assert "node7:29500" in done.stdout


def test_slurm_hands_the_warning_on_and_requeues(slurm, tmp_path):
    """USR1 ahead of the time limit reaches srun, whose end is waited for; then the job goes back into the queue."""
    srun = tmp_path / "srun"
    srun.write_text(
        "#!/bin/bash\ntrap 'echo told; exit 138' USR1\ntouch \"$STARTED\"\nfor i in $(seq 6000); do sleep 0.1; done\n"
    )
    srun.chmod(0o755)
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$1" = requeue ] && echo "$@" || echo node7\n')
    environment = {k: v for k, v in os.environ.items() if k not in CLEAN and not k.startswith("SLURM_")}
    started = tmp_path / "started"
    job = children.Child(
        ["bash", "launch/slurm.sbatch", RECIPE, FSDP2],
        cwd=ROOT,
        env={**environment, **slurm, "SLURM_JOB_ID": "17", "STARTED": str(started)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        children.wait_for(lambda: started.exists() or job.poll() is not None)
        job.send_signal(signal.SIGUSR1)
        printed, _ = job.communicate(timeout=children.LIMIT)
    finally:
        job.kill()
    assert job.returncode == 0 and printed.split() == ["told", "requeue", "17"]


def assert_is_the_command(printed, address, port):
    """That of every other way to start, for the second of two nodes with eight processes each."""
    words = shlex.split(printed)
    given = flags(words[: words.index("recipes/finetune.py")])
    assert (given["--machine_rank"], given["--num_processes"]) == ("1", "16")
    assert (given["--main_process_ip"], given["--main_process_port"]) == (address, port)
    assert words[-2:] == ["train.output_dir=/output/dpllm", "train.resume_from_checkpoint=auto"]


def test_kubernetes():
    """The manifest parses, its numbers agree with each other, and it sets exactly what torchrun.sh reads."""
    manifest = yaml.safe_load((ROOT / "launch/kubernetes.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    pod = replicas["Master"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"  # the operator looks for this name
    assert container["ports"][0]["name"] == "pytorchjob-port"
    environment = {item["name"]: item["value"] for item in container["env"]}
    assert int(environment["NNODES"]) == 1 + replicas["Worker"]["replicas"]
    assert int(environment["NPROC_PER_NODE"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts)
    assert mounts["shared-memory"] == "/dev/shm" and environment["OUTPUT_DIR"].startswith(mounts["output"])

    # The pod's own command line, with the operator's variables, ends in the command of every other way to start.
    done = children.run(
        container["command"],
        cwd=ROOT,
        env={
            "PATH": os.environ["PATH"],
            "DRY_RUN": "1",
            **environment,
            **{"RANK": "1", "MASTER_ADDR": "dpllm-master-0", "MASTER_PORT": "23456"},
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert_is_the_command(done.stdout, "dpllm-master-0", "23456")
    limits, requests = (container["resources"][kind] for kind in ("limits", "requests"))
    assert limits["nvidia.com/gpu"] == requests["nvidia.com/gpu"] and requests["memory"] == limits["memory"]
    assert pod["terminationGracePeriodSeconds"] >= 120
    # The image and the claims are no values that a cluster would accept, so they can't be forgotten.
    assert (ROOT / "launch/kubernetes.yaml").read_text().count("REPLACE_WITH_") == 6


def test_trainer_v2():
    """The TrainJob ends in the same command, and nothing of the runtime's own variables reaches accelerate."""
    manifest = yaml.safe_load((ROOT / "launch/kubernetes_trainjob.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = manifest["spec"]["trainer"]
    environment = {item["name"]: item["value"] for item in trainer["env"]}
    assert int(environment["NPROC_PER_NODE"]) == trainer["numProcPerNode"]
    given = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "dpllm-node-0-0", "PET_MASTER_PORT": "29400"}
    done = children.run(
        trainer["command"],
        cwd="/",
        env={"PATH": os.environ["PATH"], "DRY_RUN": "1", **environment, **given, "REPOSITORY": str(ROOT)},
    )
    assert_is_the_command(done.stdout, "dpllm-node-0-0", "29400")


@pytest.mark.parametrize(
    ("more", "rank"), [({"SLURM_NODEID": "3"}, "3"), ({"SLURM_NODEID": "3", "NODE_RANK": "1"}, "1")]
)
def test_the_number_of_a_node_is_that_of_the_job(more, rank):
    """As Slurm numbers its nodes, unless it is given."""
    words = command("torchrun.sh", RECIPE, FSDP2, NNODES="4", RDZV_ENDPOINT="node0:29501", NPROC_PER_NODE="2", **more)
    assert flags(words[: words.index("recipes/finetune.py")])["--machine_rank"] == rank
