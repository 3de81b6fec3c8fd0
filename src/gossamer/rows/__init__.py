"""Room 3: the numbers. The state of training is a matrix of n rows, one replica's flat parameters each; a process holds some of them.

``block`` and ``flat`` hold rows, ``replicas`` computes their gradients, ``mixing`` applies a Round to them, ``codec`` and ``movement`` say
how rows travel in few bits, ``profile`` looks at them.
"""
