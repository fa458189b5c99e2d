import torch, rectgrad, time, cProfile, pstats, sys
from rectgrad.bench import networks
from rectgrad.engine import preserve
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
m = networks.build("resnet50", 224).cuda(); x = torch.randn(1,3,224,224,device="cuda"); t=torch.zeros(1,dtype=torch.long,device="cuda")
for _ in range(5): rectgrad.attribute(m,x,"rectgrad",t)
def timed(f,n=20):
    torch.cuda.synchronize(); a=time.perf_counter()
    for _ in range(n): f()
    torch.cuda.synchronize(); return 1e3*(time.perf_counter()-a)/n
print("attribute", timed(lambda: rectgrad.attribute(m,x,"rectgrad",t)))
print("snapshot", timed(lambda: preserve.Snapshot(m)))
s=preserve.Snapshot(m); print("restore", timed(s.restore))
def region():
    r=preserve.Region(m,None,((),{}),x.device); r.open(); r.close()
print("region", timed(region))
with torch.no_grad(): print("forward", timed(lambda: m(x)))
pr=cProfile.Profile(); pr.enable()
for _ in range(20): rectgrad.attribute(m,x,"rectgrad",t)
pr.disable(); pstats.Stats(pr).sort_stats("tottime").print_stats(32); pstats.Stats(pr).sort_stats("cumtime").print_stats(40)
