package ingress

import "github.com/dpserve/dpserve/routing/kvindex"

// A text is cut into blocks that grow with their position: 256 bytes up to 4 KiB, then twice as large
// whenever the position has doubled. So a block is at most 1/8 of the text before it, the common beginning of
// two texts is known to about 5 %, and a prompt of 400 KB has 69 blocks instead of 1,600. The rank and each
// ingress store every block.
const (
	textFine = 16                                  // blocks of the first size
	textStep = textFine / 2                        // blocks of each other size
	textTop  = kvindex.MaxBlockSize                // bytes of the largest block
	textBase = textFine * kvindex.DefaultTextBlock // bytes of all blocks of the first size
)

// textBlocks appends the chain hashes of the full blocks of text to dst.
func textBlocks(dst []uint64, h kvindex.Hasher, prev uint64, text []byte) []uint64 {
	from := 0
	for size := kvindex.DefaultTextBlock; ; size *= 2 {
		end := len(text)
		if size < textTop {
			end = min(end, textFine*size)
		}
		n := len(dst)
		dst = h.Bytes(dst, prev, text[from:end], size)
		if end == len(text) {
			return dst
		}
		if len(dst) > n {
			prev = dst[len(dst)-1]
		}
		from = end
	}
}

// textSpan is the number of bytes in n leading blocks.
func textSpan(n int) int {
	if n <= textFine {
		return n * kvindex.DefaultTextBlock
	}
	bytes := textBase
	n -= textFine
	for size := 2 * kvindex.DefaultTextBlock; ; size *= 2 {
		if n <= textStep || size == textTop {
			return bytes + n*size
		}
		bytes, n = bytes+textStep*size, n-textStep
	}
}
