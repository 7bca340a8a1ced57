"""temp"""
from .drafter import Draft


class PromptLookupDrafter:
    def propose(self, wishes):
        out=[]
        for w in wishes:
            t=[int(x) for x in w.row.tokens(0, w.row.length)]
            d=()
            for n in (4,3,2):
                if len(t)<=n: continue
                for i in range(len(t)-n-1,-1,-1):
                    if t[i:i+n]==t[-n:]:
                        d=tuple(t[i+n:i+n+w.num_tokens]); break
                if d: break
            out.append(Draft(d))
        return out
    def forget(self, request_id): pass
