"""Decentralized SGD in both orders, with any optimizer d(·): "D-PSGD", and "D-Adam" when d is Adam."""

from gossamer.methods.base import Algorithm, Look
from gossamer.rows.replicas import Replicas
from gossamer.transport.mixer import Mixer


class AdaptWhileCombine(Algorithm):
    """x <- W x - η d(x): the gradient is taken at the unmixed x while x is being mixed, so communication is hidden.

    Weight decay acts on the mixed parameters, because the optimizer runs on them.
    """

    name = "dsgd-awc"

    def begin(self, replicas: Replicas, mixer: Mixer, look: Look) -> None:
        look()
        for block in replicas.blocks:
            mixer.start(block)

    def finish(self, replicas: Replicas, mixer: Mixer, look: Look) -> None:
        for block in replicas.blocks:
            mixer.finish(block)
        self.optimizer.share_momentum(mixer.moved)
        self.optimizer.step()


class AdaptThenCombine(Algorithm):
    """x <- W (x - η d(x)): a local step, then averaging. On the complete graph with plain SGD it equals all-reduce."""

    name = "dsgd-atc"

    def begin(self, replicas: Replicas, mixer: Mixer, look: Look) -> None:
        pass

    def finish(self, replicas: Replicas, mixer: Mixer, look: Look) -> None:
        self.optimizer.step()
        look()
        for block in replicas.blocks:
            mixer.start(block)
        for block in replicas.blocks:
            mixer.finish(block)
        self.optimizer.share_momentum(mixer.moved)
