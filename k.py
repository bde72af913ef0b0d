import random
def seq(seed, always=True):
    d=random.Random(seed); out=[]; kinds=[]
    n=0
    while n<5:
        if d.random()<0.7: d.random()
        d.uniform(0,1.0)
        k=d.choice(["runner","runner","kernel","worker","everything"]); kinds.append(k)
        if k!="kernel": n+=1
        d.uniform(0,.5)
    return kinds
print("local", seq(20261129)); s=random.Random(9).randrange(1000); print("slurm", s, seq(s))
