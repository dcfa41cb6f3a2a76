"""The loss over many tokens is taken in pieces and is the same loss."""

import torch
import torch.nn.functional as F

from openwafer.models.layers import loss


def test_a_long_batch_has_the_loss_of_all_its_tokens() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 3001, 11, requires_grad=True)
    labels = torch.randint(0, 11, (3, 3001))
    labels[0, :2000] = -100
    total, count = loss(logits, labels)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert count == 3 * 3001 - 2000
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
    (ours,) = torch.autograd.grad(total, logits)
    (theirs,) = torch.autograd.grad(expected, logits)
    assert torch.equal(ours, theirs)
