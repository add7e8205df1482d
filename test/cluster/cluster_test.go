package cluster_test

import (
	"fmt"
	"time"

	"github.com/dpserve/dpserve/actors/controller"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

// mutant is a rule that is broken on purpose: a simulation that does not notice proves nothing.
type mutant string

// The mutants.
const (
	noMutant      mutant = ""
	noSupersede   mutant = "a node runs on what the state shows superseded"
	noFence       mutant = "with on_lease_loss fence a node admits without a lease"
	noGrace       mutant = "the leader grants again before a lease is over"
	noConfirm     mutant = "a leader prolongs leases without asking a majority whether it leads"
	noBarrier     mutant = "a leader begins with the state of before its election"
	noFsync       mutant = "a follower acknowledges what is not on its disk"
	sendsOn       mutant = "what a deposed leader's controller proposes is sent on to the next leader"
	impatient     mutant = "the leader gives a node up that was silent for little more than two renewals"
	forgets       mutant = "a node forgets at a restart which epochs it has seen"
	early         mutant = "a node tells that a unit is gone when it begins to end it"
	noWriteLimit  mutant = "a write of the log may take as long as it likes"
	hasty         mutant = "a leader takes a silent node for lost without asking a majority after the silence"
	innocent      mutant = "a leader that hears too little takes the others for lost"
	ignoresStop   mutant = "placement ignores that a node says it stops"
	forgivesDeath mutant = "a start that its node's process dies of does not count"
	forgetsReady  mutant = "a new leader does not know what units were ready with"
	hidesFound    mutant = "a node does not tell which engines its process has found"
	adoptsUnasked mutant = "a node adopts what it has found before the leader has answered"
	skips         mutant = "a control node passes over a command that it does not know"
	losesEpochs   mutant = "a snapshot leaves out the epochs of units that are gone"
)

// config is a run.
type config struct {
	fence    bool
	ttl      time.Duration
	renew    time.Duration
	controls int    // machines with role control alone
	full     int    // machines with all roles
	workers  int    // machines without role control
	gentle   bool   // nothing happens that may cost a restart
	steady   bool   // nobody changes what is wanted
	rush     bool   // thirty times the requests
	pairs    bool   // the two applications are the pools of one, of pairs of ranks
	swapped  bool   // with pairs: the prefill pool is the one whose ranks do not move together
	lone     bool   // each process has looked for a leader for a whole lease when it begins
	only     string // the one kind of fault; "": all
	mutant   mutant
}

// controller returns the leader's timers.
func (cfg *config) controller() controller.Timers {
	switch cfg.mutant {
	case noGrace:
		return controller.Timers{LeaseTTL: cfg.ttl / 4, Regrant: cfg.ttl / 2}
	case impatient:
		return controller.Timers{LeaseTTL: 2 * cfg.renew, Regrant: 2*cfg.renew + cfg.renew/4}
	default:
		return controller.Timers{LeaseTTL: cfg.ttl}
	}
}

// cluster is the world of one run.
type cluster struct {
	*sim
	cfg        config
	machines   []*machine
	byUID      map[string]int
	net        *network
	canon      *canon
	audit      *audit
	startFails float64       // of engine starts that fail
	upset      time.Duration // when something was wrong with the whole network last
	specs      map[string]*app.Application
	work       *workload
	removals   int
	calmSince  time.Duration    // when something was wrong last, but a machine that stops
	leader     *shell           // the last that disturbed saw
	led        time.Duration    // when a majority said last that a machine leads whose disk takes writes
	told       map[uint64]*told // what nodes without role control are sent, by index
}

func newCluster(seed uint64, cfg config, trace bool) *cluster {
	c := &cluster{
		sim: newSim(seed, trace), cfg: cfg, byUID: map[string]int{},
		specs: map[string]*app.Application{}, told: map[uint64]*told{},
	}
	c.net = newNetwork(cfg.controls + cfg.full + cfg.workers + spares)
	c.canon, c.audit = newCanon(c), newAudit()
	for range cfg.full {
		c.add(true, true)
	}
	for range cfg.controls {
		c.add(true, false)
	}
	for range cfg.workers {
		c.add(false, true)
	}
	c.found()
	for _, m := range c.machines {
		m.boot()
	}
	return c
}

// spares is how many machines may come later.
const spares = 2

// add makes a machine that is not a member yet.
func (c *cluster) add(control, worker bool) *machine {
	i := len(c.machines)
	m := &machine{
		process: &process{s: c.sim, name: fmt.Sprintf("n%d", i)}, c: c, i: i, uid: uidOf(i), control: control,
		worker: worker, ingress: worker, everDeadly: map[string]bool{},
		disk: &disk{votedFor: -1, epochs: map[string]uint64{}},
	}
	c.machines = append(c.machines, m)
	c.byUID[m.uid] = i
	return m
}

// found writes the log of a cluster whose machines are all members: its name, its nodes, its voters.
func (c *cluster) found() {
	log := []*entry{newEntry(1, &state.Command{Init: &state.Init{Cluster: "sim", Secret: []byte("secret")}})}
	var members []voter
	for _, m := range c.machines {
		log = append(log, newEntry(1, &state.Command{PutNode: &state.PutNode{Node: m.record()}}))
		if m.control {
			members = append(members, voter{m.i, len(members) < voters(c.cfg.controls+c.cfg.full)})
		}
	}
	log = append(log, &entry{term: 1, members: members})
	first := &raft{c: c, m: c.machines[0], disk: c.machines[0].disk}
	for i, e := range log {
		c.canon.commit(first, i+1, e)
	}
	for _, m := range c.machines {
		if m.control {
			m.disk.log, m.disk.synced, m.disk.term = append([]*entry(nil), log...), len(log), 1
		} else {
			m.disk.saved = c.public(c.canon.now())
		}
	}
}

// voters is how many of n control nodes vote.
func voters(n int) int {
	switch {
	case n >= 5:
		return 5
	case n >= 3:
		return 3
	default:
		return 1
	}
}
