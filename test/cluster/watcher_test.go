package cluster_test

import "time"

// watcher is the copy of the state on a node without role control.
type watcher struct {
	m       *machine
	leads   int
	source  *machine
	heard   time.Duration
	spoke   bool // something came of this session
	session int
	turn    int
	wait    time.Duration
	in      inOrder
}

// following is a copy that a control node feeds.
type following struct {
	to      *machine
	gen     int
	session int
	told    uint64
	leads   int
	queued  bool
	seq     int
}

// Times of the copies, as in cluster.
const (
	watchSilence = 3 * time.Second
	watchBeat    = time.Second
	watchGap     = 20 * time.Millisecond
	watchMin     = 50 * time.Millisecond
	watchMax     = time.Second
)

func newWatcher(m *machine) *watcher {
	w := &watcher{m: m, leads: -1, wait: watchMin, turn: m.i}
	m.c.after(m.process, 0, w.connect)
	return w
}

// connect asks the next control node.
func (w *watcher) connect() {
	m := w.m
	w.session++
	w.in = inOrder{}
	w.turn++
	session := w.session
	all := m.controls()
	if len(all) == 0 {
		return
	}
	source := m.c.machines[all[w.turn%len(all)]]
	w.source = source
	w.heard, w.spoke = m.c.now, false
	from := m.view.Index
	call(m.c, m, source, watchSilence, false, func(answer func(struct{}, error)) {
		f := &following{to: m, gen: m.gen, session: session, told: from, leads: -1}
		source.follows = append(source.follows, f)
		source.feed(f)
		source.beatFollower(f)
		answer(struct{}{}, nil)
	}, func(_ struct{}, err error) {
		if err != nil && !w.spoke {
			w.broke(session)
		}
	})
	w.listen(session)
}

// listen gives up a control node that sends nothing.
func (w *watcher) listen(session int) {
	w.m.c.after(w.m.process, watchBeat, func() {
		switch {
		case w.session != session:
		case w.m.c.now-w.heard >= watchSilence:
			w.broke(session)
		default:
			w.listen(session)
		}
	})
}

func (w *watcher) broke(session int) {
	if w.session != session {
		return
	}
	w.session++ // what comes late of the old one is dropped
	w.m.c.after(w.m.process, w.wait, w.connect)
	w.wait = min(2*w.wait, watchMax)
}

// take is what a control node says.
func (w *watcher) take(s *told, leads int) {
	w.heard, w.spoke, w.wait, w.leads = w.m.c.now, true, watchMin, leads
	if s != nil && s.state.Index >= w.m.view.Index {
		w.m.publish(s.state)
		w.m.disk.saved = s.data
	}
}

func (m *machine) beatFollower(f *following) {
	m.c.after(m.process, watchBeat, func() {
		if m.feed(f) {
			m.beatFollower(f)
		}
	})
}

func (m *machine) feedFollowers() {
	for _, f := range m.follows {
		if (f.told < m.view.Index || f.leads != m.leadsAs()) && !f.queued {
			f.queued = true
			m.c.after(m.process, watchGap, func() {
				f.queued = false
				m.feed(f)
			})
		}
	}
}

// feed sends what a follower lacks, or a heartbeat. Without a leader it sends no heartbeat.
func (m *machine) feed(f *following) bool {
	if f.to.gen != f.gen || f.to.watch.session != f.session {
		m.follows = without(m.follows, f)
		return false
	}
	var s *told
	if m.view.Index > f.told {
		s = m.public()
	}
	leads := m.leadsAs()
	if s == nil && leads < 0 {
		return true
	}
	f.told, f.leads = m.view.Index, leads
	f.seq++
	seq := f.seq
	m.c.send(m, f.to, watchSilence, false, func() {
		if w := f.to.watch; w.session == f.session {
			w.in.take(seq, func() { w.take(s, leads) })
		}
	})
	return true
}

func without(all []*following, f *following) []*following {
	var out []*following
	for _, o := range all {
		if o != f {
			out = append(out, o)
		}
	}
	return out
}
