"""The rules: what each one does to a gradient.

A rule is a function (op, R) -> the gradient for each of op.inputs. Factories take the parameters.
"""

from rectgrad.rules.class_layer import ClassGate as ClassGate
from rectgrad.rules.class_layer import class_layer_rules as class_layer_rules
from rectgrad.rules.class_layer import class_layers as class_layers
from rectgrad.rules.layers import find_layers as find_layers
from rectgrad.rules.padding import masked_padding as masked_padding
from rectgrad.rules.pooling import proportional_pooling as proportional_pooling
from rectgrad.rules.rectified import deconv as deconv
from rectgrad.rules.rectified import guided as guided
from rectgrad.rules.rectified import rectified as rectified
from rectgrad.rules.relevance import absorbed_by_constants as absorbed_by_constants
from rectgrad.rules.relevance import attn_lrp_rules as attn_lrp_rules
from rectgrad.rules.relevance import excitation_rules as excitation_rules
from rectgrad.rules.relevance import lrp_rules as lrp_rules
from rectgrad.rules.rescale import deeplift_rules as deeplift_rules
