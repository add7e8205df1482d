package routing

import (
	"bytes"
	"encoding/binary"
	"math/bits"
)

const (
	// maxTreeChars bounds the charge of one tree, whatever a policy's own limits say: its distinct text, and
	// what its nodes and marks take. The least recently used text of the rank with the most goes first.
	maxTreeChars = 64 << 20
	// nodeChars and markChars are the charges of a node and a mark, in characters: about their bytes, with
	// their place in the tables. Without them, prompts that share all but their last byte would use memory
	// without a charge.
	nodeChars, markChars = 128, 64
	// maxTextChars is how much of one prompt a tree remembers. It bounds what an insert copies, and evicts,
	// under the Router's lock.
	maxTextChars = 256 << 10
	// maxPath is how many nodes of one prompt a tree remembers: an insert touches all of them.
	maxPath = 1024
)

// textTree is a radix tree over the prompts that were sent to ranks, each node marked with the ranks that
// were sent the text down to it. prefix-aware and cache-aware share it. A character is a byte: nothing here
// decodes text, so a fork inside a UTF-8 sequence is a fork like any other.
//
// Every mark is in its rank's list, most recently used first. A touch goes over the whole path from the leaf
// up, so a parent is always more recent than its children, and the last mark of the list is a leaf of that
// rank: evicting it leaves the rank's text closed under prefixes. Once the tree has its largest size, it
// allocates nothing.
type textTree struct {
	nodes []textNode // 0 is the root
	marks []textMark // 0 is no mark
	kids  table      // node, first byte → node
	owned table      // node, slot → mark
	slots table      // rank id + 1 → slot + 1
	ranks []textRank // by slot

	freeNodes, freeMarks []uint32
	buffers              textBuffers
	chars                int // of all nodes
	limit                int // of charge
}

// charge is the tree's size, which limit bounds.
func (t *textTree) charge() int {
	nodes, marks := len(t.nodes)-1-len(t.freeNodes), len(t.marks)-1-len(t.freeMarks)
	return t.chars + nodes*nodeChars + marks*markChars
}

// charge is a rank's part, as if no other rank shared its nodes.
func (r *textRank) charge() int { return r.chars + r.nodes*(nodeChars+markChars) }

type textNode struct {
	text   []byte
	parent uint32
	marks  uint32 // first of its list
}

type textMark struct {
	node, slot   uint32
	next, prev   uint32 // of the same node
	newer, older uint32 // of the same rank
}

type textRank struct {
	id             RankID
	incarnation    uint64
	used           bool
	chars          int // of the nodes that it marks
	nodes          int
	newest, oldest uint32
}

func newTextTree(v *View, limit int) *textTree {
	t := &textTree{nodes: make([]textNode, 1), marks: make([]textMark, 1), limit: limit}
	for i := range v.Ranks {
		t.addRank(v.Ranks[i].ID, v.Ranks[i].Incarnation)
	}
	return t
}

// addRank adds a rank. A new incarnation begins without text, because its engine's cache is empty.
func (t *textTree) addRank(id RankID, incarnation uint64) {
	if s := t.slots.get(uint64(id) + 1); s != 0 {
		if rk := &t.ranks[s-1]; rk.incarnation != incarnation {
			t.clearRank(s - 1)
			rk.incarnation = incarnation
		}
		return
	}
	s := 0
	for s < len(t.ranks) && t.ranks[s].used {
		s++
	}
	if s == len(t.ranks) {
		t.ranks = append(t.ranks, textRank{})
	}
	t.ranks[s] = textRank{id: id, incarnation: incarnation, used: true}
	t.slots.set(uint64(id)+1, uint32(s+1))
}

// removeRank removes a rank and its marks.
func (t *textTree) removeRank(id RankID) {
	s := t.slots.get(uint64(id) + 1)
	if s == 0 {
		return
	}
	t.clearRank(s - 1)
	t.ranks[s-1] = textRank{}
	t.slots.remove(uint64(id) + 1)
}

func (t *textTree) clearRank(slot uint32) {
	for t.ranks[slot].oldest != 0 {
		t.evict(slot)
	}
}

// textMatch is a place in the tree: length characters of the text match, the last within of them in node.
type textMatch struct {
	node           uint32
	length, within int
}

// match is the longest prefix of text that any rank was sent, of at most maxPath nodes.
func (t *textTree) match(text []byte) textMatch {
	m, _ := t.follow(text)
	return m
}

// follow is match, and reports whether it ended at maxPath.
func (t *textTree) follow(text []byte) (m textMatch, deep bool) {
	text = text[:min(len(text), maxTextChars)]
	for nodes := 0; m.length < len(text); nodes++ {
		if nodes == maxPath {
			return m, true
		}
		kid := t.kids.get(kidKey(m.node, text[m.length]))
		if kid == 0 {
			break
		}
		edge := t.nodes[kid].text
		k := commonPrefix(edge, text[m.length:])
		m = textMatch{node: kid, length: m.length + k, within: k}
		if k < len(edge) {
			break
		}
	}
	return m, false
}

// up is the place where m's node begins, seen as a place in its parent.
func (t *textTree) up(m textMatch) textMatch {
	parent := t.nodes[m.node].parent
	return textMatch{node: parent, length: m.length - m.within, within: len(t.nodes[parent].text)}
}

// insert marks text, and all its prefixes, as sent to rank id now.
func (t *textTree) insert(text []byte, id RankID) {
	s := t.slots.get(uint64(id) + 1)
	if s == 0 || len(text) == 0 {
		return
	}
	text = text[:min(len(text), maxTextChars)]
	m, deep := t.follow(text)
	node := m.node
	if node != 0 && m.within < len(t.nodes[node].text) {
		node = t.split(node, m.within)
	}
	if m.length < len(text) && !deep {
		node = t.newNode(text[m.length:], node)
	}
	for ; node != 0; node = t.nodes[node].parent {
		t.touch(node, s-1)
	}
	t.shrink()
}

// shrink keeps the tree within its bound.
func (t *textTree) shrink() {
	for t.charge() > t.limit {
		most := 0
		for i := range t.ranks {
			if t.ranks[i].charge() > t.ranks[most].charge() {
				most = i
			}
		}
		if t.ranks[most].oldest == 0 {
			return
		}
		t.evict(uint32(most))
	}
}

func kidKey(node uint32, first byte) uint64 { return uint64(node)<<8 | uint64(first) }

func ownKey(node, slot uint32) uint64 { return uint64(node)<<32 | uint64(slot) }

func (t *textTree) newNode(text []byte, parent uint32) uint32 {
	n := uint32(len(t.nodes))
	if k := len(t.freeNodes); k > 0 {
		n = t.freeNodes[k-1]
		t.freeNodes = t.freeNodes[:k-1]
	} else {
		t.nodes = append(t.nodes, textNode{})
	}
	t.nodes[n] = textNode{text: t.buffers.copy(text), parent: parent}
	t.kids.set(kidKey(parent, text[0]), n)
	t.chars += len(text)
	return n
}

// split cuts node's text behind at characters. The upper part is a new node with the same marks, each just
// ahead of the lower one's in its rank's list.
func (t *textTree) split(node uint32, at int) uint32 {
	whole := t.nodes[node].text
	upper := t.newNode(whole[:at], t.nodes[node].parent)
	t.nodes[node].text = t.buffers.copy(whole[at:])
	t.nodes[node].parent = upper
	t.chars -= at
	t.kids.set(kidKey(upper, whole[at]), node)
	t.buffers.put(whole)
	for m := t.nodes[node].marks; m != 0; m = t.marks[m].next {
		slot := t.marks[m].slot
		fresh := t.newMark(upper, slot)
		t.link(fresh, t.marks[m].newer, m)
		t.ranks[slot].nodes++
	}
	return upper
}

// touch marks node for the rank, as its most recently used.
func (t *textTree) touch(node, slot uint32) {
	rk := &t.ranks[slot]
	m := t.owned.get(ownKey(node, slot))
	if m != 0 {
		t.unlink(m)
	} else {
		m = t.newMark(node, slot)
		rk.chars += len(t.nodes[node].text)
		rk.nodes++
	}
	t.link(m, 0, rk.newest)
}

func (t *textTree) newMark(node, slot uint32) uint32 {
	m := uint32(len(t.marks))
	if k := len(t.freeMarks); k > 0 {
		m = t.freeMarks[k-1]
		t.freeMarks = t.freeMarks[:k-1]
	} else {
		t.marks = append(t.marks, textMark{})
	}
	n := &t.nodes[node]
	t.marks[m] = textMark{node: node, slot: slot, next: n.marks}
	if n.marks != 0 {
		t.marks[n.marks].prev = m
	}
	n.marks = m
	t.owned.set(ownKey(node, slot), m)
	return m
}

// link puts a mark into its rank's list between newer and older; 0 is an end of the list.
func (t *textTree) link(m, newer, older uint32) {
	rk := &t.ranks[t.marks[m].slot]
	t.marks[m].newer, t.marks[m].older = newer, older
	if newer != 0 {
		t.marks[newer].older = m
	} else {
		rk.newest = m
	}
	if older != 0 {
		t.marks[older].newer = m
	} else {
		rk.oldest = m
	}
}

func (t *textTree) unlink(m uint32) {
	rk, k := &t.ranks[t.marks[m].slot], t.marks[m]
	if k.newer != 0 {
		t.marks[k.newer].older = k.older
	} else {
		rk.newest = k.older
	}
	if k.older != 0 {
		t.marks[k.older].newer = k.newer
	} else {
		rk.oldest = k.newer
	}
}

// evict removes the rank's least recently used mark; the rank must have one.
func (t *textTree) evict(slot uint32) {
	m := t.ranks[slot].oldest
	k := t.marks[m]
	t.unlink(m)
	n := &t.nodes[k.node]
	if k.prev != 0 {
		t.marks[k.prev].next = k.next
	} else {
		n.marks = k.next
	}
	if k.next != 0 {
		t.marks[k.next].prev = k.prev
	}
	t.owned.remove(ownKey(k.node, slot))
	t.marks[m] = textMark{}
	t.freeMarks = append(t.freeMarks, m)
	t.ranks[slot].chars -= len(n.text)
	t.ranks[slot].nodes--
	if n.marks == 0 { // no rank has it, so it has no children: their marks would be here too
		t.removeNode(k.node)
	}
}

func (t *textTree) removeNode(node uint32) {
	n := &t.nodes[node]
	t.kids.remove(kidKey(n.parent, n.text[0]))
	t.chars -= len(n.text)
	t.buffers.put(n.text)
	*n = textNode{}
	t.freeNodes = append(t.freeNodes, node)
}

// commonPrefix is how many leading bytes a and b share.
func commonPrefix(a, b []byte) int {
	n := min(len(a), len(b))
	if bytes.Equal(a[:n], b[:n]) {
		return n
	}
	i := 0
	for ; i+8 <= n; i += 8 {
		if x := binary.LittleEndian.Uint64(a[i:]) ^ binary.LittleEndian.Uint64(b[i:]); x != 0 {
			return i + bits.TrailingZeros64(x)/8
		}
	}
	for i < n && a[i] == b[i] {
		i++
	}
	return i
}

const (
	minBuffer = 5  // log2 of the smallest text buffer
	maxBuffer = 18 // log2 of the largest, maxTextChars
	// maxSpareChars bounds the buffers that wait for their next use.
	maxSpareChars = 16 << 20
)

// textBuffers keeps the memory of removed texts, by size, for new ones.
type textBuffers struct {
	free  [maxBuffer + 1][][]byte
	spare int
}

func (b *textBuffers) copy(text []byte) []byte {
	class := max(minBuffer, bits.Len(uint(len(text)-1)))
	var buf []byte
	if k := len(b.free[class]); k > 0 {
		buf = b.free[class][k-1]
		b.free[class] = b.free[class][:k-1]
		b.spare -= 1 << class
	} else {
		buf = make([]byte, 0, 1<<class)
	}
	return append(buf[:0], text...)
}

func (b *textBuffers) put(buf []byte) {
	class := bits.Len(uint(cap(buf) - 1))
	if b.spare+1<<class > maxSpareChars || cap(buf) != 1<<class {
		return
	}
	b.spare += 1 << class
	b.free[class] = append(b.free[class], buf[:0])
}
