// TeX's commands for single characters.

const table = (text) => text.trim().split(/\s+/).map((pair) => pair.split(":"));

export const LETTERS = new Map(table(`
alpha:α beta:β gamma:γ delta:δ epsilon:ϵ varepsilon:ε zeta:ζ eta:η theta:θ vartheta:ϑ iota:ι kappa:κ lambda:λ mu:μ nu:ν
xi:ξ pi:π varpi:ϖ rho:ρ varrho:ϱ sigma:σ varsigma:ς tau:τ upsilon:υ phi:ϕ varphi:φ chi:χ psi:ψ omega:ω
Gamma:Γ Delta:Δ Theta:Θ Lambda:Λ Xi:Ξ Pi:Π Sigma:Σ Upsilon:Υ Phi:Φ Psi:Ψ Omega:Ω
infty:∞ partial:∂ nabla:∇ hbar:ℏ ell:ℓ Re:ℜ Im:ℑ aleph:ℵ emptyset:∅ varnothing:∅ forall:∀ exists:∃ nexists:∄ top:⊤ bot:⊥
angle:∠ imath:ı jmath:ȷ wp:℘ degree:° dots:… ldots:… cdots:⋯ vdots:⋮ ddots:⋱ prime:′ square:□ checkmark:✓
`));

export const OPERATORS = new Map(table(`
times:× div:÷ pm:± mp:∓ cdot:⋅ ast:∗ star:⋆ circ:∘ bullet:∙ oplus:⊕ ominus:⊖ otimes:⊗ odot:⊙ wedge:∧ land:∧ vee:∨ lor:∨
cap:∩ cup:∪ setminus:∖ neg:¬ lnot:¬ leq:≤ le:≤ geq:≥ ge:≥ neq:≠ ne:≠ approx:≈ equiv:≡ sim:∼ simeq:≃ cong:≅ propto:∝ ll:≪
gg:≫ in:∈ notin:∉ ni:∋ subset:⊂ supset:⊃ subseteq:⊆ supseteq:⊇ to:→ rightarrow:→ leftarrow:← gets:← leftrightarrow:↔
Rightarrow:⇒ Leftarrow:⇐ Leftrightarrow:⇔ implies:⟹ iff:⟺ mapsto:↦ longrightarrow:⟶ uparrow:↑ downarrow:↓ mid:∣ nmid:∤
parallel:∥ perp:⊥ models:⊨ vdash:⊢ therefore:∴ because:∵ colon:: coloneqq:≔ triangleq:≜ prec:≺ succ:≻ preceq:⪯ succeq:⪰
lbrace:{ rbrace:} langle:⟨ rangle:⟩ lfloor:⌊ rfloor:⌋ lceil:⌈ rceil:⌉ vert:| Vert:‖ lVert:‖ rVert:‖ lvert:| rvert:| backslash:\\
`));

/** Operators whose limits stand above and below them in displays. */
export const LARGE = new Map(table(`
sum:∑ prod:∏ coprod:∐ bigcup:⋃ bigcap:⋂ bigvee:⋁ bigwedge:⋀ bigoplus:⨁ bigotimes:⨂
`));

export const INTEGRALS = new Map(table("int:∫ iint:∬ iiint:∭ oint:∮"));

export const FUNCTIONS = new Set(
  ("sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log ln lg exp det dim ker hom deg arg gcd Pr").split(" ")
);
export const LIMITS = new Map(table("lim:lim limsup:lim_sup liminf:lim_inf max:max min:min sup:sup inf:inf argmax:arg_max argmin:arg_min"));

export const ACCENTS = new Map(table(`
hat:^ widehat:^ bar:¯ overline:¯ vec:→ dot:˙ ddot:¨ tilde:~ widetilde:~ check:ˇ breve:˘ overrightarrow:→
`));

export const SPACES = new Map([
  [",", "0.17em"], [":", "0.22em"], [";", "0.28em"], ["!", "-0.17em"], [" ", "0.25em"], ["quad", "1em"], ["qquad", "2em"],
]);

/** Values of mathvariant, and of the first capital and small letter and digit in Unicode's mathematical alphabets. */
export const ALPHABETS = new Map([
  ["mathbb", { A: 0x1d538, a: 0x1d552, 0: 0x1d7d8, but: { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" } }],
  ["mathbf", { A: 0x1d400, a: 0x1d41a, 0: 0x1d7ce }],
  ["boldsymbol", { A: 0x1d468, a: 0x1d482, 0: 0x1d7ce }],
  ["bm", { A: 0x1d468, a: 0x1d482, 0: 0x1d7ce }],
  ["mathcal", { A: 0x1d49c, a: 0x1d4b6, but: { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" } }],
  ["mathscr", { A: 0x1d49c, a: 0x1d4b6, but: { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" } }],
  ["mathfrak", { A: 0x1d504, a: 0x1d51e, but: { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" } }],
]);
