"Repeated blocks and deferred models in replicas: `to_tpu_distributed`."
from fresh import run_ok

def test_replicas_train_the_same_with_plain_checkpointed_and_looped_blocks():
    code = """
    from fastai.vision.all import *
    from fastai_xla.all import *
    from fastai_xla.models.blocks import BlockRunner
    def train(*cbs):
        set_seed(1)
        ds = [(TensorImage(torch.randn(3,16,16)), TensorCategory(i%3)) for i in range(24)]
        dls = DataLoaders(DataLoader(ds, bs=4), DataLoader(ds[:8], bs=4))
        learn = Learner(dls, mean_vit(32, 2, 3, 8, img_size=16, num_classes=3), CrossEntropyLossFlat(), cbs=cbs, opt_func=SGD).to_tpu_distributed(n_cores=2, processes=True)
        with learn.no_bar(),learn.no_logging(): learn.fit(2, 1e-1)
        return [p.detach().cpu() for p in learn.model.parameters()]
    if __name__=='__main__':
        plain,*others = [train(*o) for o in ((), (BlockRunner(),), (BlockRunner(scan=True),))]
        print([max((a-b).abs().max().item() for a,b in zip(plain, o))<1e-5 for o in others])
    """
    assert run_ok(code, timeout=600, MPLBACKEND='Agg').splitlines()[-1]=='[True, True]'
