package controller
import ("testing";"fmt")
func TestDbg(t *testing.T){
	l := newLossy(t, 1)
	prev := l.auto
	l.auto = func(w *world, e Effect) bool { switch e := e.(type) { case StartEffect: w.log("ORDER start %s %d %s", e.Order.Unit,e.Order.Epoch,e.Node); case StopEffect: w.log("ORDER stop %s %d %s", e.Order.Unit, e.Order.Epoch, e.Node)}; return prev(w,e)}
	defer func(){ for _, x := range l.trace { fmt.Println(x)} }()
	for range 400 { l.log("at %v", l.now.Sub(start)); l.chance(); l.check() }; l.settle()
}
