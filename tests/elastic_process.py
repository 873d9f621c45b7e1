"""A worker in a process of its own: says what happens to it, a line of JSON each."""

import json
import sys
import time
from pathlib import Path

import torch

import lowcomm
from fleet import digest
from lowcomm.sync.elastic import ElasticGroup
from toy import network, train


def say(**what):
    print(json.dumps(what), flush=True)


def main(lighthouse, name, end):
    torch.set_num_threads(1)
    group = ElasticGroup(lighthouse, name=name, start_with=3, timeout_s=5.0)
    group.register_change_hook(lambda change: say(**change._asdict()))
    model = network()
    opt = lowcomm.DiLoCo(model.parameters(), lr=0.01, sync_every=10, group=group)
    say(began_at=opt.stats.steps)
    opt.register_round_hook(lambda stats: say(rounds=stats.rounds))
    while not Path(end).exists():
        step = opt.stats.steps
        train(model, opt, range(step, step + 1), group.rank)
        time.sleep(0.01)
    opt.finish()
    say(result=digest(model.parameters()))
    group.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
