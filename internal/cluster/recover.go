package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// indexJump is how far a recovery moves the log's index: more entries than the lost voters can have decided
// after the last one that this log has. The other nodes have seen those, and take no older state.
const indexJump = 1_000_000

// Recovery is the folder of a stopped control node whose fellow voters are lost for good. It is locked until
// Close.
type Recovery struct {
	Identity
	State *state.State // by all entries of the log, committed or not
	Index uint64       // of the last entry

	members []Member
	home    io.Closer
	disk    *disk
	log     *slog.Logger
}

// OpenRecovery reads the folder and changes nothing. The errors are Conflict for a folder that is in use,
// that is no control node's, or whose node has all votes already, and say what else is wrong with it.
func OpenRecovery(dataDir string, log *slog.Logger) (*Recovery, error) {
	for _, name := range []string{identityFile, raftDir} {
		if err := requireInFolder(dataDir, name); err != nil {
			return nil, err
		}
	}
	home, err := takeDataDir(dataDir)
	if err != nil {
		return nil, err
	}
	cfg := Config{DataDir: dataDir, Log: log}.withDefaults()
	r := &Recovery{home: home, log: cfg.Log}
	if err := r.open(cfg); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// requireInFolder refuses a folder that lacks a file of each control node.
func requireInFolder(dataDir, name string) error {
	_, err := os.Stat(filepath.Join(dataDir, name))
	switch {
	case err == nil:
		return nil
	case !errors.Is(err, fs.ErrNotExist):
		return problem.New(problem.InvalidArgument, "look at data dir %s: %w", dataDir, err).
			WithHint("run this command as the user that dpserve runs as")
	case name == raftDir:
		return problem.New(problem.Conflict, "data dir %s is of a node without role control: it has no copy "+
			"of the cluster's log", dataDir).
			WithHint("run this on a machine that had role control; workers and ingresses need no recovery")
	}
	return problem.New(problem.InvalidArgument, "%s is no data dir of dpserve: it has no %s", dataDir, name).
		WithHint("name the --data-dir of a stopped control node")
}

func (r *Recovery) open(cfg Config) error {
	id, err := readIdentity(cfg)
	if err != nil {
		return err
	}
	r.Identity = id.Identity
	if r.disk, err = openFiles(cfg); err != nil {
		return err
	}
	if err := r.read(); err != nil {
		return problem.New(problem.Internal, "read the log of %s: %w", cfg.DataDir, err).
			WithHint("nothing was changed; use the folder of another control node, or a backup of one")
	}
	return r.check(cfg.DataDir)
}

// read replays snapshot and log. Entries that no majority has confirmed count too: the voters that could tell
// are lost.
func (r *Recovery) read() error {
	var book addressBook
	f, unreadable := newFSM(), error(nil)
	f.startRun(func(why error) { unreadable = why })
	servers, at, err := book.readAll(r.disk.log)
	if err != nil {
		return err
	}
	snaps, err := r.disk.snaps.List()
	if err != nil {
		return err
	}
	if len(snaps) > 0 {
		if snaps[0].ConfigurationIndex > at {
			servers = snaps[0].Configuration
		}
		r.Index = snaps[0].Index
		_, source, err := r.disk.snaps.Open(snaps[0].ID)
		if err == nil {
			err = f.Restore(source)
		}
		if err != nil {
			return err
		}
	}
	last, err := r.disk.log.LastIndex()
	for i := r.Index + 1; i <= last && err == nil; i++ {
		var l raft.Log
		if err = r.disk.log.GetLog(i, &l); err == nil {
			f.Apply(&l)
			r.Index = i
		}
	}
	r.members, r.State = toMembers(servers), f.work
	return cmp.Or(err, unreadable)
}

func (r *Recovery) check(dataDir string) error {
	switch self := nodeByUID(r.State, r.UID); {
	case r.State.Cluster != "" && r.State.Cluster != r.Cluster:
		return problem.New(problem.Conflict, "the log in %s is of cluster %s, its %s says %s", dataDir,
			r.State.Cluster, identityFile, r.Cluster).
			WithHint("two data dirs were mixed: use a backup, or another control node's")
	case slices.Equal(r.members, []Member{{UID: r.UID, Voter: true}}):
		return problem.New(problem.Conflict, "%s is the only voter of its cluster already: there is nothing "+
			"to recover", r.Node).
			WithHint("start it: it needs no other node to lead")
	case slices.Contains(r.State.Removed, r.UID):
		return problem.New(problem.Conflict, "%s was removed from its cluster", r.Node).
			WithHint("recover another control node; this one joins again with an empty --data-dir")
	case self.ID == "":
		return problem.New(problem.Conflict, "the log in %s does not know this node yet", dataDir).
			WithHint("recover another control node")
	}
	return nil
}

// Voters names the members of consensus that vote, by UID.
func (r *Recovery) Voters() map[string]bool {
	out := map[string]bool{}
	for _, m := range r.members {
		out[m.UID] = m.Voter
	}
	return out
}

// Apply makes the node the only voter. If it ends before it is done, it may be repeated.
func (r *Recovery) Apply(now time.Time) error {
	id := raft.ServerID(r.UID)
	_, transport := raft.NewInmemTransport(raft.ServerAddress(id))
	rc := raft.DefaultConfig()
	rc.LocalID, rc.Logger = id, newRaftLog(r.log, func(string) string { return "" }, never)
	f := &recoveredFSM{fsm: newFSM(), uid: r.UID, index: r.Index + indexJump, now: now.UnixMilli()}
	f.startRun(func(error) {}) // Snapshot returns what Apply could not read
	err := raft.RecoverCluster(rc, f, wholeLog{r.disk.log}, r.disk.log, jumpedSnapshots{r.disk.snaps},
		transport, raft.Configuration{Servers: []raft.Server{{ID: id, Address: transport.LocalAddr()}}})
	if err != nil {
		return diskError("recover", err)
	}
	return nil
}

// Close unlocks the folder.
func (r *Recovery) Close() error {
	var err error
	if r.disk != nil {
		err = r.disk.Close()
	}
	return errors.Join(err, r.home.Close())
}

// recoveredFSM takes the snapshot with which the recovered cluster begins.
type recoveredFSM struct {
	*fsm
	uid   string
	index uint64
	now   int64
}

// Snapshot implements raft.FSM.
func (f *recoveredFSM) Snapshot() (raft.FSMSnapshot, error) {
	if f.stopped == nil {
		if err := state.Recover(f.work, f.uid, f.now); err != nil {
			return nil, err
		}
		f.work.Index = f.index
	}
	return f.fsm.Snapshot()
}

// jumpedSnapshots puts the snapshot of a recovery at indexJump behind the end of the log.
type jumpedSnapshots struct{ raft.SnapshotStore }

// Create implements raft.SnapshotStore.
func (s jumpedSnapshots) Create(
	version raft.SnapshotVersion, index, term uint64, conf raft.Configuration, confIndex uint64,
	t raft.Transport,
) (raft.SnapshotSink, error) {
	return s.SnapshotStore.Create(version, index+indexJump, term, conf, confIndex, t)
}

// wholeLog is a log that RecoverCluster empties. A log without entries is empty already.
type wholeLog struct{ LogStore }

// DeleteRange implements raft.LogStore.
func (w wholeLog) DeleteRange(from, to uint64) error {
	if to == 0 {
		return nil
	}
	if err := w.LogStore.DeleteRange(from, to); err != nil {
		return fmt.Errorf("empty the log: %w", err)
	}
	return nil
}
