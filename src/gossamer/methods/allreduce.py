"""Centralized training: gradients are averaged over all replicas every step, so all replicas stay the same."""

from gossamer.methods.base import Algorithm, Look
from gossamer.rows.replicas import Replicas
from gossamer.transport.mixer import Mixer


class AllReduce(Algorithm):
    name = "allreduce"
    averages_gradients = True

    def begin(self, replicas: Replicas, mixer: Mixer, look: Look) -> None:
        pass

    def finish(self, replicas: Replicas, mixer: Mixer, look: Look) -> None:
        for block in replicas.blocks:
            mixer.mean_(block.grad)
        self.optimizer.step()
        look()
