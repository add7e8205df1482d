package state

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestLeaseIsOverAfterTTLAndGrace(t *testing.T) {
	l := NewLeases(10*time.Second, 2*time.Second)
	assert.True(t, l.Due().IsZero())
	assert.Zero(t, l.Left("a", noon))
	l.Track("b", noon)
	l.Seen("a", noon.Add(3*time.Second))
	l.Track("a", noon.Add(9*time.Second)) // known: changes nothing
	l.Seen("a", noon)                     // older: changes nothing
	assert.Equal(t, noon.Add(12*time.Second), l.Due())
	assert.Equal(t, time.Second, l.Left("a", noon.Add(12*time.Second)))
	assert.Zero(t, l.Left("b", noon.Add(11*time.Second)))
	assert.Empty(t, l.Overdue(noon.Add(12*time.Second-1)))
	assert.Equal(t, []string{"b"}, l.Overdue(noon.Add(12*time.Second)))
	assert.Equal(t, []string{"a", "b"}, l.Overdue(noon.Add(15*time.Second)))
	l.Forget("b")
	assert.Equal(t, []string{"a"}, l.Overdue(noon.Add(15*time.Second)))
	l.Seen("a", noon.Add(15*time.Second))
	assert.Empty(t, l.Overdue(noon.Add(15*time.Second)))
}

func TestLeaseDefaultsArePinned(t *testing.T) {
	l := NewLeases(0, 0)
	l.Track("a", noon)
	assert.Equal(t, noon.Add(12*time.Second), l.Due())
	assert.Equal(t, 10*time.Second, l.Left("a", noon))
}

// TestAnyRenewalsAgreeWithTheLog: only the latest renewal decides whether a node is overdue, and no node is
// before Due.
func TestAnyRenewalsAgreeWithTheLog(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l, now := NewLeases(5*time.Second, time.Second), noon
		log := map[string]time.Time{}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 3000).Draw(t, "ms")) * time.Millisecond)
			node := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "node")
			_, known := log[node]
			switch rapid.IntRange(0, 5).Draw(t, "what") {
			case 0:
				l.Forget(node)
				delete(log, node)
			case 1:
				l.Track(node, now)
				if !known {
					log[node] = now
				}
			default:
				l.Seen(node, now)
				log[node] = now
			}
			over := l.Overdue(now)
			for n, at := range log {
				require.Equal(t, !now.Before(at.Add(6*time.Second)), slices.Contains(over, n))
			}
			require.True(t, slices.IsSorted(over))
			require.Equal(t, len(over) > 0, !l.Due().IsZero() && !now.Before(l.Due()))
		}
	})
}

// TestKeptNodesAreNotOverdue: a node whose process is replaced may be silent for longer, and no longer than
// it has asked for.
func TestKeptNodesAreNotOverdue(t *testing.T) {
	l := NewLeases(10*time.Second, 2*time.Second)
	l.Seen("a", noon)
	l.Keep("a", noon.Add(time.Minute))
	assert.Equal(t, noon.Add(time.Minute), l.Due())
	assert.Empty(t, l.Overdue(noon.Add(time.Minute-1)))
	assert.True(t, l.IsKept("a", noon.Add(time.Minute-1)))
	assert.Equal(t, []string{"a"}, l.Overdue(noon.Add(time.Minute)))
	l.Keep("a", time.Time{})
	assert.Equal(t, []string{"a"}, l.Overdue(noon.Add(12*time.Second)))
	assert.False(t, l.IsKept("a", noon))
	l.Keep("a", noon.Add(time.Second)) // shorter than a lease
	assert.Empty(t, l.Overdue(noon.Add(11*time.Second)))
}
