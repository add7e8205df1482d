package harness

import (
	"errors"
	"sync"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/diskfile"
)

// Disk is the disk under the log of one node, or under its files that change. Safe for concurrent use.
type Disk struct {
	mu    sync.Mutex
	until chan struct{} // writes wait for it; nil = they do not
	err   error         // of every write; nil = they succeed
}

// Hang blocks every write from now on, until Heal.
func (d *Disk) Hang() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.until == nil {
		d.until = make(chan struct{})
	}
}

// Fill makes writes fail from now on as on a full disk, until Heal.
func (d *Disk) Fill() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.err = errors.New("no space left on device")
}

// Heal lets writes go on.
func (d *Disk) Heal() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.until != nil {
		close(d.until)
	}
	d.until, d.err = nil, nil
}

func (d *Disk) write(do func() error) error {
	d.mu.Lock()
	until, err := d.until, d.err
	d.mu.Unlock()
	if until != nil {
		<-until
	}
	if err != nil {
		return err
	}
	return do()
}

// replace is diskfile.Replace on the disk.
func (d *Disk) replace(path string, data []byte) error {
	return d.write(func() error { return diskfile.Replace(path, data) })
}

// under puts the disk under a log.
func (d *Disk) under(s cluster.LogStore) cluster.LogStore { return diskLog{s, d} }

type diskLog struct {
	cluster.LogStore
	disk *Disk
}

func (l diskLog) StoreLogs(logs []*raft.Log) error {
	return l.disk.write(func() error { return l.LogStore.StoreLogs(logs) })
}

func (l diskLog) DeleteRange(from, to uint64) error {
	return l.disk.write(func() error { return l.LogStore.DeleteRange(from, to) })
}

func (l diskLog) Set(key, value []byte) error {
	return l.disk.write(func() error { return l.LogStore.Set(key, value) })
}

func (l diskLog) SetUint64(key []byte, value uint64) error {
	return l.disk.write(func() error { return l.LogStore.SetUint64(key, value) })
}
