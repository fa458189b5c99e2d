import torch, time, statistics as st, cProfile, pstats, sys, io
import rectgrad
from rectgrad.bench import networks as bn
torch.backends.cuda.matmul.allow_tf32=True; torch.backends.cudnn.allow_tf32=True
from rectgrad import kernels
print(kernels.in_use(), torch.__version__)
def t(f,n):
    f();f();torch.cuda.synchronize(); r=[];c=[]
    for _ in range(n):
        s=time.perf_counter();f();c.append(time.perf_counter()-s);torch.cuda.synchronize();r.append(time.perf_counter()-s)
    return st.median(r)*1e3, st.median(c)*1e3
def peak(f):
    torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats(); f(); torch.cuda.synchronize(); return torch.cuda.max_memory_allocated()/2**20
for name,px in (("resnet50",224),("inception_v4",299)):
    m=bn.build(name,px).cuda().to(memory_format=torch.channels_last).eval()
    for p in m.parameters(): p.requires_grad_(False)
    for n in (64,1):
        x=torch.randn(n,3,px,px,device="cuda").to(memory_format=torch.channels_last)
        def plain():
            y=x.clone().requires_grad_(); o=m(y); return torch.autograd.grad(o[:,5].sum(), y)[0]
        def rg(): return rectgrad.attribute(m,x,target=5)
        def nopad(): return rectgrad.attribute(m,x,target=5,padding_trick=False)
        def guided(): return rectgrad.attribute(m,x,"guided_backprop",target=5)
        def sal(): return rectgrad.attribute(m,x,"saliency",target=5)
        def rec():
            from rectgrad.records import _subject; from rectgrad.passes import Pass; from rectgrad.methods import RectGrad
            s=_subject(m,x,5,(),None); return Pass(s,s.tape_for(RectGrad()))
        base=t(plain,15)
        print(name,n,"plain",base,"peak",peak(plain))
        for f in (rg,nopad,guided,sal,rec): 
            v=t(f,15); print(name,n,f.__name__,[round(a,2) for a in v],"ratio",round(v[0]/base[0],3),"peak",round(peak(f)/peak(plain),3), flush=True)
        if n==1 or name=="resnet50":
            pr=cProfile.Profile(); pr.enable()
            for _ in range(10): rg()
            torch.cuda.synchronize(); pr.disable(); s=io.StringIO(); pstats.Stats(pr,stream=s).sort_stats("tottime").print_stats(22); print("\n".join(l[:110] for l in s.getvalue().splitlines()[5:]))
