"""Training in simulation needs torch, numpy and safetensors; libraries of other parts are not even imported."""

from tests.absent import BEYOND_TRAINING, run_without

SCRIPT = """
from pathlib import Path
from keyfed.config.load import Config, apply_settings
from keyfed.lab.experiment.cell import run_cell
from keyfed.run.loop import train

settings = ["data.name={data}", "data.vocab=100", "model.embed=8", "model.hidden=8", "train.cohort=2", "train.rounds=1",
            "train.workers=1", "data.window=5", "data.unseen=0"]
result = train(apply_settings(Config(), settings), Path("run"))
print(result["rounds"])
"""


def test_a_machine_with_torch_alone_trains(tmp_path):
    data = tmp_path / "texts"
    data.mkdir()
    for name in "abc":
        (data / f"{name}.txt").write_text("the cat sat on the mat and the dog sat on the cat\n" * 20, "utf-8")
    done = run_without(BEYOND_TRAINING, SCRIPT.format(data=data), cwd=tmp_path)
    assert done.stdout.strip() == "1"
