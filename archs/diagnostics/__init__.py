"""What the depth of a trained model does: one file a diagnostic, all against the interface of a topology. Needs torch.

Blocks count from 0. Depth l is the place before block l: depth 0 is the embedding, depth L what the final norm reads.
"""
