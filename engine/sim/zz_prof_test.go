package sim
import ("testing";"time";"sort";"fmt";"strings")
func TestZZJitter(t *testing.T){
 p:=launch(t,"--sim-step-ms","20"); p.waitReady(t)
 resp:=postURL(t,p.url()+"/v1/completions",strings.Replace(streamBody,"40","200",1)); defer resp.Body.Close()
 buf:=make([]byte,8192); var ts []time.Time
 for { n,err:=resp.Body.Read(buf); if n>0 {ts=append(ts,time.Now())}; if err!=nil {break} }
 var off []float64
 for i:=range ts { d:=ts[i].Sub(ts[0])-time.Duration(i)*20*time.Millisecond; off=append(off,float64(d.Microseconds())) }
 sort.Float64s(off); fmt.Println(len(off),off[0],off[len(off)/2],off[len(off)*95/100],off[len(off)-1])
 begun:=time.Now(); q:=launch(t); for { r,err:=client.Get(q.url()+"/health"); if err==nil {r.Body.Close(); if r.StatusCode==200 {break}}; time.Sleep(time.Millisecond)}; fmt.Println("start",time.Since(begun))
}
