package inbox

import "github.com/asynkron/protoactor-go/actor"

// worker runs one actor's mailbox on one goroutine that lives as long as the actor. protoactor's own
// dispatcher starts a goroutine per burst, whose small stack grows anew each time: that was two thirds of the
// 4 µs of a question and answer.
type worker struct{ runs chan func() }

var _ actor.Dispatcher = (*worker)(nil)

func newWorker() *worker { return &worker{runs: make(chan func(), 1)} }

// Schedule implements actor.Dispatcher. It never blocks: the mailbox schedules again only after the run
// before it began to return, so one slot is enough. After the actor's stop the slot may keep one run that
// nobody takes; it has nothing to do.
func (w *worker) Schedule(run func()) { w.runs <- run }

// Throughput implements actor.Dispatcher: messages between two yields, protoactor's default.
func (w *worker) Throughput() int { return 300 }

// serve runs the mailbox until stopped is closed by a run.
func (w *worker) serve(stopped <-chan struct{}) {
	for run := range w.runs {
		run()
		select {
		case <-stopped:
			return
		default:
		}
	}
}
