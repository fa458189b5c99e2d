"""The methods, one file per family, and the catalogue of their names."""

from rectgrad.methods.averages import ExpectedGradients as ExpectedGradients
from rectgrad.methods.averages import IntegratedGradients as IntegratedGradients
from rectgrad.methods.averages import SmoothGrad as SmoothGrad
from rectgrad.methods.cam import GradCAM as GradCAM
from rectgrad.methods.cam import GuidedGradCAM as GuidedGradCAM
from rectgrad.methods.catalog import METHODS as METHODS
from rectgrad.methods.control import RandomMap as RandomMap
from rectgrad.methods.deeplift import DeepLift as DeepLift
from rectgrad.methods.deeplift import DeepLiftShap as DeepLiftShap
from rectgrad.methods.gradients import Deconv as Deconv
from rectgrad.methods.gradients import GradientXInput as GradientXInput
from rectgrad.methods.gradients import GuidedBackprop as GuidedBackprop
from rectgrad.methods.gradients import Saliency as Saliency
from rectgrad.methods.lrp import LRP as LRP
from rectgrad.methods.lrp import AttnLRP as AttnLRP
from rectgrad.methods.lrp import EpsilonLRP as EpsilonLRP
from rectgrad.methods.lrp import ExcitationBackprop as ExcitationBackprop
from rectgrad.methods.method import Method as Method
from rectgrad.methods.perturbation import RISE as RISE
from rectgrad.methods.perturbation import Occlusion as Occlusion
from rectgrad.methods.rectgrad import RectGrad as RectGrad
